"""The text model: read this first. One forward pass reads like model specification 3.1.

The model holds weights and nothing that outlives a step; state is in `cache/view.py`, what a step
is in `step.py`. Letters: T rows of the call, C streams, D hidden, V vocabulary.
Read next: `layer.py`, `csa.py`, `engram.py`, `dspark.py`.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from twinspark.cache.layout import PAGE_TOKENS
from twinspark.cache.rows import Store
from twinspark.cache.view import INDEX_SCRATCH_BYTES, Caches
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.hyper_connections import collapse
from twinspark.kernels.rms_norm import rms_norm
from twinspark.model.csa import Attention
from twinspark.model.dspark import DSpark, Pick
from twinspark.model.engram import Engram, StepHash
from twinspark.model.hyper_connections import first_pre
from twinspark.model.indexer import CallState
from twinspark.model.layer import Layer
from twinspark.model.linear import ModelLoader
from twinspark.model.rows import Rows
from twinspark.model.step import DraftRequest, DraftResult, Span, StepInput, StepOutput

__all__ = ["DraftRequest", "DraftResult", "Span", "StepInput", "StepOutput", "Transformer"]


class Transformer:
    """A loaded model.

    Attributes:
        config: the pack's config.
        dtype: of activations, bfloat16 (float64 in the wide reference).
        weight_bytes: memory the weights take on this rank, Engram tables not counted.
    """

    def __init__(self, loader: ModelLoader, token_map: np.ndarray | None) -> None:
        """Load all weights. `load_model` in `loading.py` is the way in."""
        config = loader.config
        self.config = config
        self.dtype = loader.dtype
        self._wide = loader.wide
        self._group = loader.group
        self._embed_VD = loader.plain("embed.weight", loader.dtype)
        self._norm_D = loader.plain("norm.weight")
        self._head = loader.columns("head", config.vocab_size)
        self._hash = None if token_map is None else StepHash(config, token_map)
        self._engrams = {layer: Engram(loader, layer) for layer in config.engram_layer_ids}
        self._layers: list[Layer] = []
        self._attention: list[Attention] = []
        for number in range(config.num_hidden_layers):
            self._layers.append(Layer(loader, f"layers.{number}", number))
            self._attention.append(Attention(loader, number))
            loader.report((number + 1) / config.num_layers_with_drafts)
        self._draft = (
            DSpark(loader, self.embed, self.head) if config.num_nextn_predict_layers else None
        )
        loader.report(1.0)
        self.weight_bytes = loader.num_bytes

    def new_caches(
        self,
        num_slots: int,
        max_tokens: int,
        *,
        store: Store = "bf16",
        page_tokens: int = PAGE_TOKENS,
        num_pages: int | None = None,
        index_scratch_bytes: int = INDEX_SCRATCH_BYTES,
        split_pool: bool = False,
    ) -> Caches:
        """Empty caches for this model, see `Caches`; split_pool spreads pages over its ranks."""
        return Caches(
            self.config,
            num_slots,
            max_tokens,
            store=store,
            dtype=self.dtype,
            page_tokens=page_tokens,
            num_pages=num_pages,
            index_scratch_bytes=index_scratch_bytes,
            split_over=self._group if split_pool else None,
        )

    @property
    def has_draft(self) -> bool:
        """Whether the model has draft blocks."""
        return self._draft is not None

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Embedding rows [T, D], not scaled."""
        return self._embed_VD[torch.tensor(ids, dtype=torch.int64)]

    def head(self, x_TD: Tensor) -> Tensor:
        """Logits [T, V] fp32 of normed rows, one product a vocabulary shard."""
        return self._head.wide(x_TD)

    @torch.inference_mode()
    def forward(self, step: StepInput, caches: Caches) -> StepOutput:
        """Run the rows of a step, write their state, return the wanted logits.

        Draft context is written for the rows too when the model has draft blocks.

        Args:
            step: spans of contiguous positions, at most one a slot; earlier positions of a slot
                must have been run.
            caches: written in place.
        """
        config = self.config
        check_step(step, caches, config.engram_max_ngram_size - 1)
        begin_spans(step, caches, config.sliding_window)
        rows = Rows(step.spans, caches.layout)
        rows.mark(step.ids_T, config.image_token_id)
        call = CallState()
        hashes = self._hash.rows(step) if self._hash else None
        taps: list[tuple[Rows, Tensor]] = []

        x_TCD = self.embed(step.ids_T).unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre_TC = first_pre(len(rows), config.hc_mult, self._wide)
        for number, layer in enumerate(self._layers):
            if number in self._engrams and hashes is not None:
                here = hashes[torch.from_numpy(rows.numbers)]
                x_TCD = self._engrams[number](x_TCD, here, rows.marks.image_T)
            if number in config.dspark_target_layer_ids:
                taps.append((rows, stream_mean(x_TCD)))
            kept = rows.after_queries_of(number, config)
            attend = partial(
                self._attention[number], rows=rows, kept=kept, caches=caches, call=call
            )
            places = rows.places_of(kept)
            x_TCD, pre_TC = layer(x_TCD, pre_TC, attend, places=places, marks=kept.marks)
            rows = kept
            if not len(rows):
                break
        if self._draft is not None and len(taps) == len(config.dspark_target_layer_ids):
            last = taps[-1][0]
            self._draft.write_context(join_taps(taps, last), last, caches)
        return self._logits(x_TCD, pre_TC, rows, step.logit_rows)

    def _logits(
        self, x_TCD: Tensor, pre_TC: Tensor, rows: Rows, wanted: Sequence[int]
    ) -> StepOutput:
        there = {int(number): place for place, number in enumerate(rows.numbers)}
        found = [number for number in wanted if number in there]
        if not found:
            empty = torch.zeros(0, self.config.vocab_size, dtype=self._wide)
            return StepOutput(logits_RV=empty, rows=[])
        places = torch.tensor([there[number] for number in found])
        h_TD = collapse(x_TCD[places], pre_TC[places])
        h_TD = rms_norm(h_TD, self._norm_D, eps=self.config.rms_norm_eps)
        return StepOutput(logits_RV=self.head(h_TD), rows=found)

    @torch.inference_mode()
    def draft(
        self, requests: Sequence[DraftRequest], caches: Caches, pick: Pick | None
    ) -> list[DraftResult]:
        """Draft the next tokens of several requests in one pass (model specification 5.3).

        Args:
            requests: each with all positions before `position` processed.
            caches: read only.
            pick: (request number, block slot j, logits_V) -> token; draft j takes position + 1 + j.
                None on a rank that only follows: the result is then empty.
        """
        if self._draft is None:
            return [DraftResult(tokens=[], confidence=[]) for _ in requests]
        return self._draft.draft(requests, caches, pick)


def stream_mean(x_TCD: Tensor) -> Tensor:
    """A tap: plain mean over the streams, not the collapse (5.1), in the dtype of x."""
    wide = compute_dtype(x_TCD.dtype)
    total = x_TCD[:, 0].to(wide)
    for stream in range(1, x_TCD.shape[1]):
        total = total + x_TCD[:, stream].to(wide)
    return (total / x_TCD.shape[1]).to(x_TCD.dtype)


def join_taps(taps: Sequence[tuple[Rows, Tensor]], last: Rows) -> Tensor:
    """Taps side by side [T, taps * D], for the rows that reached the last tap."""
    parts = []
    for rows, tap_TD in taps:
        places = rows.places_of(last)
        parts.append(tap_TD if places is None else tap_TD[places])
    return torch.cat(parts, dim=1)


def check_step(step: StepInput, caches: Caches, reach: int) -> None:
    """Check what the engine must hold to; these are our own mistakes."""
    slots = [span.slot for span in step.spans]
    assert len(set(slots)) == len(slots), f"two spans of one slot: {slots}"
    assert sum(s.count for s in step.spans) == len(step.ids_T), "ids and spans differ in rows"
    assert len(step.history) == len(step.spans), "one history a span"
    for span, history in zip(step.spans, step.history, strict=True):
        assert span.count > 0 and 0 <= span.slot < caches.layout.num_slots
        assert span.first + span.count <= caches.layout.max_tokens, "past the cache's end"
        assert span.mode == "full" or span.prompt_end is not None
        assert span.prompt_end is None or span.first + span.count <= span.prompt_end
        assert span.prompt_end is None or not span.is_pruned, "prompt rows are never pruned"
        assert len(history) >= min(reach, span.first), "history is too short for the hash"


def begin_spans(step: StepInput, caches: Caches, window: int) -> None:
    """Set the window starts: 0 for new requests, T - W for replayed prompts (section 6)."""
    for span in step.spans:
        if span.first == 0:
            caches.reset(span.slot)
        if span.mode == "replay" and span.prompt_end is not None:
            caches.window_start[span.slot] = max(0, span.prompt_end - window)
