"""Drive a Transformer from tests: sessions of several slots, and views of their state.

`prompt` gives the golden prompts.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.golden.tiny_weights import prompt as prompt
from torch import Tensor

from twinspark.cache.view import Caches
from twinspark.model.step import DraftRequest, DraftResult, PrefillMode, Span, StepInput
from twinspark.model.transformer import Transformer

GOLDEN = Path(__file__).parents[2] / "golden" / "model_golden.safetensors"
_DTYPES = {"F32": np.float32, "F64": np.float64, "I16": np.int16, "I32": np.int32}


def golden(name: str) -> Tensor:
    """One array of the golden file; BF16 as float32."""
    data = memoryview(GOLDEN.read_bytes())
    (size,) = struct.unpack_from("<Q", data)
    info = json.loads(bytes(data[8 : 8 + size]))[name]
    first, last = info["data_offsets"]
    raw = data[8 + size + first : 8 + size + last]
    if info["dtype"] == "BF16":
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        array: Any = bits.view(np.float32)
    else:
        array = np.frombuffer(raw, _DTYPES[info["dtype"]]).copy()
    return torch.from_numpy(array.reshape(info["shape"]))


def tiny_token_map() -> np.ndarray:
    """The map that stands in for a tokenizer on TINY (model specification 1.3)."""
    ids = np.arange(512)
    return np.where(ids < 400, ids, ids - 400)


def greedy(number: int, j: int, logits_V: Tensor) -> int:
    """Largest logit, ties to the lowest id."""
    return int(torch.argmax(logits_V))


class Session:
    """A model with caches and the ids of every slot."""

    def __init__(
        self,
        model: Transformer,
        *,
        slots: int = 1,
        max_tokens: int = 192,
        store: str = "bf16",
        **settings: Any,
    ) -> None:
        self.model = model
        self.caches: Caches = model.new_caches(slots, max_tokens, store=store, **settings)
        self.ids: dict[int, list[int]] = {slot: [] for slot in range(slots)}

    def feed(
        self,
        ids: Sequence[int],
        *,
        slot: int = 0,
        prompt_end: int | None = None,
        mode: PrefillMode = "full",
    ) -> Tensor:
        """Run ids of one slot; logits of the rows that have them."""
        return self.step({slot: ids}, prompt_end=prompt_end, mode=mode)[slot]

    def step(
        self,
        parts: dict[int, Sequence[int]],
        *,
        prompt_end: int | None = None,
        mode: PrefillMode = "full",
    ) -> dict[int, Tensor]:
        """Run ids of several slots in one forward, in the dict's order."""
        spans, flat, history, owner = [], [], [], []
        for slot, ids in parts.items():
            first = len(self.ids[slot])
            spans.append(
                Span(slot=slot, first=first, count=len(ids), prompt_end=prompt_end, mode=mode)
            )
            history.append(tuple(self.ids[slot][-3:]))
            flat += list(ids)
            owner += [slot] * len(ids)
            self.ids[slot] += list(ids)
        step = StepInput(
            spans=tuple(spans),
            ids_T=flat,
            history=tuple(history),
            logit_rows=list(range(len(flat))),
        )
        out = self.model.forward(step, self.caches)
        slots = np.array([owner[row] for row in out.rows])
        return {s: out.logits_RV[torch.from_numpy(slots == s)] for s in parts}

    def prefill(
        self,
        ids: Sequence[int],
        *,
        slot: int = 0,
        chunk: int | Sequence[int] | None = None,
        mode: PrefillMode = "full",
    ) -> Tensor:
        """A whole prompt in pieces; logits of all rows that have them."""
        sizes = [chunk or len(ids)] * len(ids) if not isinstance(chunk, Sequence) else list(chunk)
        parts, at = [], 0
        for size in sizes:
            if at >= len(ids):
                break
            part = ids[at : at + size]
            parts.append(self.feed(part, slot=slot, prompt_end=len(ids), mode=mode))
            at += len(part)
        return torch.cat(parts)

    def rewind(self, length: int, *, slot: int = 0) -> None:
        """Take back everything from position `length` on."""
        del self.ids[slot][length:]

    def draft(self, token: int, *, slot: int = 0, pick: Any = greedy) -> DraftResult:
        """Draft what follows `token` at the slot's next position."""
        return self.draft_all([self.request(token, slot=slot)], pick=pick)[0]

    def request(self, token: int, *, slot: int = 0) -> DraftRequest:
        """A draft of what follows `token` at the slot's next position."""
        return DraftRequest(slot=slot, position=len(self.ids[slot]), token=token)

    def draft_all(
        self, requests: Sequence[DraftRequest], *, pick: Any = greedy
    ) -> list[DraftResult]:
        """One draft pass over several requests."""
        return self.model.draft(requests, self.caches, pick)

    def state(self, *, slot: int = 0, drafts: bool = True) -> dict[str, Tensor]:
        """Everything a later reader at the slot's next position may read."""
        return visible_state(self.model, self.caches, slot, len(self.ids[slot]), drafts=drafts)


def visible_state(
    model: Transformer, caches: Caches, slot: int, length: int, *, drafts: bool = True
) -> dict[str, Tensor]:
    """Window rows, ring row, compressed rows and keys that readers at `length` may see."""
    config, layout = model.config, caches.layout
    state: dict[str, Tensor] = {}
    for layer in range(config.num_layers_with_drafts if drafts else config.num_hidden_layers):
        draft = layer >= config.num_hidden_layers
        reach = layout.window if draft else layout.window - 1
        start = caches.window_start[slot] if layer > config.first_decoder_layer else 0
        positions = torch.arange(max(0 if draft else start, length - reach), length)
        index = slot * layout.window_rows + positions % layout.window_rows
        index = index.to(caches.device)
        state[f"window.{layer}"] = caches.window(layer).read(index).clone()
    for source in config.kv_source_layer_ids:
        ratio = config.ratio(source)
        first, count = slot * layout.entries(ratio), length // ratio
        state[f"rows.{source}"] = caches.rows(source).read_range(first, count).clone()
        state[f"keys.{source}"] = caches.keys(source).read_range(first, count).clone()
        if ratio == 2 and length % 2:
            place = slot * layout.ring_rows + (length - 1) % layout.ring_rows
            state[f"ring.{source}"] = caches.ring(source)[place].clone()
    return state


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bitwise equality of two states, naming what differs."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"state differs in {different}"
