"""Checkpoints: the fixed-size state of a slot at a position, as bytes (design section 6, D24).

What a reader at that position needs beyond the pages: the windows of all layers, the draft blocks'
context, the open row of ratio-2 pairs, the window start. A state knows neither its slot nor what
else its rings held: places that do not exist are zero, so equal states are equal bytes.
Read next: `view.py`, `pages.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.cache.layout import CacheLayout
from twinspark.cache.rows import RingTable
from twinspark.config.model import ModelConfig

_HEAD_BYTES = 16  # position, window start


@dataclass(frozen=True)
class Rings:
    """The per-slot memory that states are made of.

    Attributes:
        layout: sizes.
        config: which layers there are.
        windows: one a layer or draft block.
        open_rows: compressor rings of ratio-2 sources [rows, 2H], by source.
        device: where all of them are.
    """

    layout: CacheLayout
    config: ModelConfig
    windows: Sequence[RingTable]
    open_rows: Mapping[int, Tensor]
    device: torch.device


@dataclass(frozen=True)
class _Part:
    """Rows of one window: the `reach` positions before the state's, with bytes of each."""

    table: RingTable
    reach: int
    is_decoder: bool

    @property
    def num_bytes(self) -> int:
        return self.reach * self.table.row_bytes


def state_bytes(rings: Rings, *, encoder_only: bool = False) -> int:
    """Bytes of a state."""
    windows = sum(part.num_bytes for part in _parts(rings, encoder_only))
    return _HEAD_BYTES + windows + sum(_row_bytes(ring) for ring in rings.open_rows.values())


def save_state(
    rings: Rings, slot: int, position: int, window_start: int, *, encoder_only: bool = False
) -> Tensor:
    """The state of a slot whose positions below `position` are right.

    Args:
        rings: read only.
        slot: whose.
        position: h; at most 31 later positions of the slot have been run since.
        window_start: first position whose window rows exist above the first decoder layer.
        encoder_only: leave out what only layers above it and draft blocks read.

    Returns:
        uint8 [state_bytes].
    """
    layout = rings.layout
    start = window_start if window_start > position - (layout.window - 1) else 0
    start = 0 if encoder_only else start
    pieces = [torch.tensor([position, start]).view(torch.uint8)]
    for part in _parts(rings, encoder_only):
        positions = torch.arange(position - part.reach, position)
        index = _ring_rows(layout, slot, positions).to(rings.device)
        rows = part.table.read_bytes(index).cpu()
        first = start if part.is_decoder else 0
        if position - part.reach < first:
            rows = rows.masked_fill((positions < first)[:, None], 0)
        pieces.append(rows.reshape(-1))
    for ring in rings.open_rows.values():
        if position % 2:
            place = slot * layout.ring_rows + (position - 1) % layout.ring_rows
            pieces.append(ring[place].contiguous().cpu().view(torch.uint8))
        else:
            pieces.append(torch.zeros(_row_bytes(ring), dtype=torch.uint8))
    return torch.cat(pieces)


def load_state(rings: Rings, slot: int, position: int, state: Tensor) -> int:
    """Put a state into a slot, any slot; the kind is known by its size.

    Returns:
        The slot's window start.
    """
    sizes = {state_bytes(rings, encoder_only=only): only for only in (False, True)}
    assert len(state) in sizes, f"a state of {len(state)} bytes, expected one of {sorted(sizes)}"
    saved, start = state[:_HEAD_BYTES].clone().view(torch.int64).tolist()
    assert saved == position, f"the state is of position {saved}, not {position}"
    layout, at = rings.layout, _HEAD_BYTES
    for part in _parts(rings, sizes[len(state)]):
        rows = state[at : at + part.num_bytes].view(part.reach, -1)
        index = _ring_rows(layout, slot, torch.arange(position - part.reach, position))
        part.table.write_bytes(index.to(rings.device), rows.to(rings.device))
        at += part.num_bytes
    for ring in rings.open_rows.values():
        place = slot * layout.ring_rows + (position - 1) % layout.ring_rows
        size = _row_bytes(ring)
        ring[place] = state[at : at + size].clone().view(ring.dtype)
        at += size
    return int(start)


def _parts(rings: Rings, encoder_only: bool) -> Iterator[_Part]:
    config, reach = rings.config, rings.layout.window - 1
    for layer in range(config.num_hidden_layers):
        decoder = layer > config.first_decoder_layer
        if not (decoder and encoder_only):
            yield _Part(rings.windows[layer], reach, decoder)
    if not encoder_only:
        # a draft pass at p reads the W positions before p (model specification 5.3)
        for table in rings.windows[config.num_hidden_layers :]:
            yield _Part(table, reach + 1, False)


def _ring_rows(layout: CacheLayout, slot: int, positions: Tensor) -> Tensor:
    return slot * layout.window_rows + positions % layout.window_rows


def _row_bytes(ring: Tensor) -> int:
    return ring.shape[1] * ring.element_size()
