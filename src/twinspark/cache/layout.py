"""Sizes of a request's state and of the pool of pages, from the model's config. No tensors.

Model specification 4.1 (inventory) and 4.4 (ring sizes), design D22 (pages), D23 (rows a round).
Read next: `pages.py` (long-range rows), `view.py` (all state of all slots).
"""

from dataclasses import dataclass

from twinspark.config.model import ModelConfig

RING_ROWS = 32
"""Rows of a compressor ring, and what a window ring holds beyond W (design D23)."""

PAGE_TOKENS = 256
"""Positions of a page when nobody says otherwise (design D22)."""


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
        page_tokens: positions of a page, even.
    """

    num_slots: int
    max_tokens: int
    num_layers: int
    window: int
    window_rows: int
    ring_rows: int
    page_tokens: int = PAGE_TOKENS

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        num_slots: int,
        max_tokens: int,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> "CacheLayout":
        """The layout of a model's caches."""
        assert page_tokens > 0 and page_tokens % 2 == 0, "a ratio-2 pair may not cross pages"
        return cls(
            num_slots=num_slots,
            max_tokens=max_tokens,
            num_layers=config.num_layers_with_drafts,
            window=config.sliding_window,
            window_rows=config.sliding_window + RING_ROWS,
            ring_rows=RING_ROWS,
            page_tokens=page_tokens,
        )

    @property
    def slot_pages(self) -> int:
        """Most pages of a slot."""
        return -(-self.max_tokens // self.page_tokens)

    def page_entries(self, ratio: int) -> int:
        """Compressed entries of a page at this ratio."""
        return self.page_tokens // ratio

    def entries(self, ratio: int) -> int:
        """Compressed entries a slot can hold at this ratio, in whole pages."""
        return self.slot_pages * self.page_entries(ratio)
