"""The text model: read this first. One forward pass reads like model specification 3.1.

The model holds weights and nothing that outlives a step; state is in `cache/view.py`, what a step
is in `step.py`. Letters: T rows of the call, C streams, D hidden, V vocabulary.
Read next: `layer.py`, `csa.py`, `engram.py`, `dspark.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.layout import PAGE_TOKENS
from twinspark.cache.rows import Store
from twinspark.cache.upload import upload
from twinspark.cache.view import INDEX_SCRATCH_BYTES, Caches
from twinspark.kernels.places.places import Places, decode_places
from twinspark.kernels.plain.norm import embed_streams
from twinspark.model.csa import Attention
from twinspark.model.decode import DecodeRound, DecodeRows, DraftRound
from twinspark.model.dspark import DSpark, Pick
from twinspark.model.engram import Engram, SlotRows, StepHash
from twinspark.model.layer import Layer
from twinspark.model.linear import ModelLoader
from twinspark.model.partial import EngramRows, PartialPass
from twinspark.model.rows import Locate, Rows
from twinspark.model.step import DraftRequest, DraftResult, Span, StepInput, StepOutput
from twinspark.model.streams import Streams, Taps

__all__ = ["DraftRequest", "DraftResult", "Span", "StepInput", "StepOutput", "Transformer"]


class Transformer:
    """A loaded model.

    Attributes:
        config: the pack's config.
        dtype: of activations, bfloat16 (float64 in the wide reference).
        device: where weights and activations are.
        weight_bytes: memory the weights take on this rank, Engram tables not counted.
    """

    def __init__(self, loader: ModelLoader, token_map: np.ndarray | None) -> None:
        """Load all weights. `load_model` in `loading.py` is the way in."""
        config = loader.config
        self.config = config
        self.dtype = loader.dtype
        self.device = loader.device
        self._is_placed = loader.is_fused
        self._wide = loader.wide
        self._group = loader.group
        self._embed_VD = loader.plain("embed.weight", loader.dtype)
        self._norm_D = loader.plain("norm.weight")
        self._plain_P, self._compressed_P = loader.inv_freq(0), loader.inv_freq(1)
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
            device=self.device,
            page_tokens=page_tokens,
            num_pages=num_pages,
            index_scratch_bytes=index_scratch_bytes,
            split_over=self._group if split_pool else None,
        )

    def rehearsal(self) -> AbstractContextManager[object]:
        """While open other ranks are not asked, and results mean nothing; see `Collectives`."""
        return self._group.rehearsal()

    @property
    def has_draft(self) -> bool:
        """Whether the model has draft blocks."""
        return self._draft is not None

    def embed(self, ids_T: Tensor) -> Tensor:
        """The streams [T, C, D] of tokens (int32): the embedding in each, not scaled."""
        return embed_streams(self._embed_VD, ids_T, self.config.hc_mult)

    def head(self, x_TD: Tensor) -> Tensor:
        """Logits [T, V] fp32 of normed rows, one product a vocabulary shard."""
        return self._head.wide(x_TD)

    def is_placed(self, caches: Caches) -> bool:
        """Whether rows are worked out and read on a device, as `decode` and `draft_block` do."""
        return self._is_placed and not caches.is_split

    def begin(self, step: StepInput, caches: Caches) -> None:
        """Check a step and begin its spans; what `forward` does first."""
        check_step(step, caches, self.config.engram_max_ngram_size - 1)
        begin_spans(step, caches, self.config.sliding_window)

    @torch.inference_mode()
    def forward(self, step: StepInput, caches: Caches) -> StepOutput:
        """Run the rows of a step, write their state, return the wanted logits.

        Draft context is written for the rows too when the model has draft blocks.

        Args:
            step: spans of contiguous positions, at most one a slot; earlier positions of a slot
                must have been run.
            caches: written in place.
        """
        begun = self.start(step, caches)
        self.advance(begun)
        return self.finish(begun)

    @torch.inference_mode()
    def start(self, step: StepInput, caches: Caches) -> PartialPass:
        """`forward` before its first layer; `advance` and `finish` do the rest.

        Between them other slots may go on, and other passes of theirs; not those of `step`.
        """
        self.begin(step, caches)
        rows = Rows(step.spans, caches.layout, self.device, locate=self._locate(caches))
        rows.mark(step.ids_T, self.config.image_token_id)
        hash_TLC = self._hash.rows(step) if self._hash else None
        (ids_T,) = upload([torch.tensor(step.ids_T, dtype=torch.int32)], self.device)

        # rows are read when their layer comes, beside what a device has been given to do
        def engram_rows(layer: int, here: Rows) -> Tensor:
            assert hash_TLC is not None
            numbers = torch.from_numpy(here.numbers)
            return self._engrams[layer].rows(hash_TLC[numbers], self.device)

        return self._before_layers(ids_T, rows, engram_rows, caches, wanted=step.logit_rows)

    @torch.inference_mode()
    def advance(self, begun: PartialPass, end: int | None = None) -> None:
        """Run the layers of a started pass up to `end`, exclusive; None is all of them."""
        end = len(self._layers) if end is None else end
        while begun.next_layer < end and not begun.is_over:
            self._run_layer(begun)

    @torch.inference_mode()
    def finish(self, begun: PartialPass) -> StepOutput:
        """What a pass gives that has come through all layers."""
        assert begun.is_over, f"layer {begun.next_layer} has not been run"
        return self._logits(begun.streams, begun.rows, begun.wanted)

    @torch.inference_mode()
    def decode(self, round_: DecodeRound, caches: Caches) -> Tensor:
        """`forward` for decode rows whose tensors are on the device: logits [T, V] of all rows.

        For models whose rows are placed. Reads no value on the host, so a graph can hold it.

        Args:
            round_: the rows, of spans that were begun.
            caches: written in place; read `caches.starts_S` before a graph is run again.
        """
        locate = self._locate(caches)
        assert locate is not None, "rows of this model are planned on the host"
        tables = dict(zip(self.config.engram_layer_ids, round_.engram, strict=True))
        rows = DecodeRows(round_, caches.layout, locate)
        begun = self._before_layers(round_.ids_T, rows, lambda layer, _: tables[layer], caches)
        self.advance(begun)
        return self._head_of(begun.streams)

    def engram_rows(self, step: StepInput) -> dict[int, Tensor]:
        """By Engram layer the table rows of a step, bf16 [T, columns * width], on the host."""
        if self._hash is None:
            return {}
        hash_TLC = self._hash.rows(step)
        return {layer: engram.gather(hash_TLC) for layer, engram in self._engrams.items()}

    @property
    def engram_fields(self) -> list[tuple[torch.dtype, tuple[int, int]]]:
        """Types and shapes of one row of what `put_engram` writes, layer after layer."""
        return [field for engram, _ in self._staged_engrams for field in engram.fields]

    def put_engram(self, rows: Sequence[SlotRows], into: Sequence[npt.NDArray[Any]]) -> None:
        """Write the table rows of decode rows into arrays of `engram_fields`, their rows first."""
        if self._hash is None:
            return
        hash_TLC = self._hash.of_runs(rows)
        num = len(hash_TLC)
        for engram, part in self._staged_engrams:
            engram.put(hash_TLC, [array[:num] for array in into[part]])

    def engram_tables(self, sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What `DecodeRound.engram` holds, from tensors of `engram_fields` on the device."""
        return tuple(engram.rows_of(sent[part]) for engram, part in self._staged_engrams)

    @cached_property
    def _staged_engrams(self) -> list[tuple[Engram, slice]]:
        """Engram layers that rows are staged for, each with its part of `engram_fields`."""
        found, place = [], 0
        for engram in self._engrams.values() if self._hash is not None else ():
            found.append((engram, slice(place, place + len(engram.fields))))
            place += len(engram.fields)
        return found

    def _before_layers(
        self,
        ids_T: Tensor,
        rows: Rows,
        engram_rows: EngramRows,
        caches: Caches,
        *,
        wanted: Sequence[int] = (),
    ) -> PartialPass:
        return PartialPass(
            rows=rows,
            streams=Streams(self.embed(ids_T)),
            taps=Taps(len(self.config.dspark_target_layer_ids)),
            engram_rows=engram_rows,
            caches=caches,
            wanted=wanted,
        )

    def _run_layer(self, begun: PartialPass) -> None:
        """Run rows through their next layer, behind the last one write what drafts read."""
        config, number, rows = self.config, begun.next_layer, begun.rows
        caches, taps = begun.caches, begun.taps
        if len(rows):
            if number in self._engrams:
                begun.streams = begun.streams.settled(eps=config.rms_norm_eps)
                table_TK = begun.engram_rows(number, rows)
                x_TCD = self._engrams[number](begun.streams.x_TCD, table_TK, rows.marks.image_T)
                begun.streams = begun.streams._replace(x_TCD=x_TCD)
            tap_TD = None
            if number in config.dspark_target_layer_ids:
                tap_TD = taps.place(rows, begun.streams.x_TCD)
            kept = rows.after_queries_of(number, config)
            attend = partial(
                self._attention[number], rows=rows, kept=kept, caches=caches, call=begun.call
            )
            begun.streams = self._layers[number](
                begun.streams, attend, places=rows.places_of(kept),
                marks=rows.marks, kept_marks=kept.marks, tap_TD=tap_TD,
            )  # fmt: skip
            begun.rows = kept
        begun.next_layer += 1
        begun.is_over = begun.next_layer == len(self._layers) or not len(begun.rows)
        if begun.is_over and self._draft is not None and taps.is_complete and len(taps.rows):
            self._draft.write_context(taps.joined(), taps.rows, caches)

    def _locate(self, caches: Caches) -> Locate | None:
        if not self.is_placed(caches):
            return None

        def locate(positions_T: Tensor, slots_T: Tensor) -> Places:
            return decode_places(
                positions_T, slots_T, caches.starts_S, caches.page_table_SP,
                self._plain_P, self._compressed_P, caches.place_sizes,
            )  # fmt: skip

        return locate

    def _logits(self, streams: Streams, rows: Rows, wanted: Sequence[int]) -> StepOutput:
        there = {int(number): place for place, number in enumerate(rows.numbers)}
        found = [number for number in wanted if number in there]
        if not found:
            empty = torch.zeros(0, self.config.vocab_size, dtype=self._wide, device=self.device)
            return StepOutput(logits_RV=empty, rows=[])
        places = [there[number] for number in found]
        if places != list(range(len(rows))):
            streams = streams.narrow(*upload([torch.tensor(places)], self.device))
        return StepOutput(logits_RV=self._head_of(streams), rows=found)

    def _head_of(self, streams: Streams) -> Tensor:
        h_TD = streams.enter(self._norm_D, eps=self.config.rms_norm_eps).x_TD
        assert h_TD is not None
        return self.head(h_TD)

    @torch.inference_mode()
    def draft_block(self, round_: DraftRound, caches: Caches) -> tuple[Tensor, Tensor]:
        """What a draft pass computes before the first token is chosen; a graph can hold it.

        Returns:
            hidden [n * B, D] and base logits [n * B, V] of the block rows.
        """
        assert self._draft is not None
        return self._draft.block(round_, caches)

    @torch.inference_mode()
    def walk(
        self, requests: Sequence[DraftRequest], hidden_TD: Tensor, base_TV: Tensor, pick: Pick
    ) -> list[DraftResult]:
        """Choose tokens from what `draft_block` gave for the requests' rows."""
        assert self._draft is not None
        return self._draft.walk(requests, hidden_TD, base_TV, pick)

    @property
    def walks_on_device(self) -> bool:
        """Whether there is `walk_by`."""
        return self._draft is not None and self._draft.walks_on_device

    @torch.inference_mode()
    def walk_by(
        self,
        tokens_n: Tensor,
        hidden_TD: Tensor,
        base_TV: Tensor,
        choose: Callable[[int, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The same on the device, see `DSpark.walk_by`."""
        assert self._draft is not None
        return self._draft.walk_by(tokens_n, hidden_TD, base_TV, choose)

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
