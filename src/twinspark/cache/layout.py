"""Sizes of a request's state, from the model's config. No tensors.

Model specification 4.1 (inventory) and 4.4 (ring sizes), design D23 (rows a round).
Read next: `rows.py` (row formats), `view.py` (all state of all slots).
"""

from dataclasses import dataclass

from twinspark.config.model import ModelConfig

RING_ROWS = 32
"""Rows of a compressor ring, and what a window ring holds beyond W (design D23)."""

ENTRY_BLOCK = 64
"""Entries of a slot are allocated in whole blocks of this size, so keys can be read in blocks."""


@dataclass(frozen=True)
class CacheLayout:
    """Row counts of the caches.

    Attributes:
        num_slots: requests that can hold state at once.
        max_tokens: positions a slot can hold.
        num_layers: backbone layers plus draft blocks; each has a window.
        window: W, positions a window shows, its own included.
        window_rows: rows of a window ring, Cw.
        ring_rows: rows of a compressor ring, Cr.
    """

    num_slots: int
    max_tokens: int
    num_layers: int
    window: int
    window_rows: int
    ring_rows: int

    @classmethod
    def of(cls, config: ModelConfig, num_slots: int, max_tokens: int) -> "CacheLayout":
        """The layout of a model's caches."""
        return cls(
            num_slots=num_slots,
            max_tokens=max_tokens,
            num_layers=config.num_layers_with_drafts,
            window=config.sliding_window,
            window_rows=config.sliding_window + RING_ROWS,
            ring_rows=RING_ROWS,
        )

    def entries(self, ratio: int) -> int:
        """Compressed entries a slot can hold at this ratio, in whole blocks."""
        needed = -(-self.max_tokens // ratio)
        return -(-needed // ENTRY_BLOCK) * ENTRY_BLOCK
