"""Index keys in pages, as a cache holds them, and what is wanted of a search. Tensors and numbers.

Letters: T query rows, K chosen entries, B candidate blocks. Read next: `reference.py`, `cuda.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinspark.kernels.rounding import unpack_index_key

NO_ENTRY = -1
SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class KeyPages:
    """All index keys of one kv source; an entry is a page and a row of it.

    Attributes:
        data: uint8 [pages, bytes], contiguous. A page is all rows' e2m1 pairs, then all rows' scale
            bytes (rule B) when `packed`, else rows of bf16 or fp64 values on rule B's grid.
        page_rows: rows of a page.
        width: H, values a key.
        packed: which of the two.
        dtype: of plain values, and what packed ones are read as.
    """

    data: Tensor
    page_rows: int
    width: int
    packed: bool
    dtype: torch.dtype = torch.bfloat16

    def read(self, page_L: Tensor, row_L: Tensor) -> Tensor:
        """Keys [L, H] of places that exist."""
        rows = self.page_rows
        if not self.packed:
            plain = self.data.view(self.dtype).view(-1, self.width)
            return plain.index_select(0, page_L * rows + row_L)
        pairs = self.width // 2
        pages, row_L = self.data.index_select(0, page_L), row_L[:, None]
        values = pages[:, : rows * pairs].view(len(page_L), rows, pairs)
        scales = pages[:, rows * pairs :].reshape(len(page_L), rows, -1)
        return unpack_index_key(
            values.gather(1, row_L[..., None].expand(-1, 1, pairs))[:, 0],
            scales.gather(1, row_L[..., None].expand(-1, 1, scales.shape[2]))[:, 0].contiguous(),
            self.dtype,
        )


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is searched for.

    Attributes:
        k: entries to choose.
        max_entries: no row sees more; a number of the host, such as a bucket of contexts.
        block_size: entries a candidate block.
        top_blocks: candidate blocks to choose as well; 0 is none.
        candidates_TB: int32 [T, B] blocks a row may choose from, ascending, -1 at the end; None is
            all.
        scratch_bytes: for scores; changes no bit. Never taken as less than one row's.
    """

    k: int
    max_entries: int
    block_size: int = 1
    top_blocks: int = 0
    candidates_TB: Tensor | None = None
    scratch_bytes: int = SCRATCH_BYTES

    @property
    def num_blocks(self) -> int:
        """Candidate blocks to choose; none where all are and later sources are free."""
        every = -(-self.max_entries // self.block_size) <= self.top_blocks
        return 0 if every else self.top_blocks


@dataclass(frozen=True)
class Selected:
    """What a search chose.

    Attributes:
        entries_TK: int32 [T, K], ascending, -1 at the end.
        physical_TK: int32 [T, K], page * page_rows + row of each entry; -1 at the end.
        blocks_TB: int32 [T, top_blocks] candidate blocks, ascending, -1 at the end; None where all
            are chosen or none were asked for.
    """

    entries_TK: Tensor
    physical_TK: Tensor
    blocks_TB: Tensor | None
