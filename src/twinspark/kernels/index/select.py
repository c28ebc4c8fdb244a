"""The index search: which long-range entries every row reads (model specification 3.6, 3.7).

One op: queries are turned and rounded, entries scored, the best k chosen by the total order (score
descending, then entry ascending; -0 equals 0). Letters: T query rows, N index heads, H index head
size, P rotated pairs, K chosen entries. Read next: `reference.py`, `cuda.py`.
"""

from typing import Literal

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.index.cuda import Queries, select_cuda, why_not_index_cuda
from twinspark.kernels.index.pages import KeyPages, Selected, Wanted
from twinspark.kernels.index.reference import index_queries, select_reference

Backend = Literal["auto", "cuda", "reference"]


def select_entries(
    q_TNH: Tensor,
    w_TN: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    *,
    index_scale: float,
    visible_T: Tensor,
    slots_T: Tensor,
    page_table: Tensor,
    keys: KeyPages,
    wanted: Wanted,
    backend: Backend = "auto",
) -> Selected:
    """Choose entries for rows of any slots; a row's choice depends on that row and its keys only.

    The CUDA body reads no length on the host and can be captured: lengths, slots and pages may
    change between replays. Scores are fp32 sums over heads in the order of `run_scores`; both
    bodies give the same bits where the products of a head's four groups add up exactly. The CUDA
    body takes groups 2^50 below the largest of their query or key as zero.

    Args:
        q_TNH: [T, N, H] bf16 (or fp64) products with wq_b, neither rotated nor rounded; T may be 0.
        w_TN: [T, N] products with weights_proj, not scaled.
        cos_TP: fp32 [T, P], cosines of the rows' positions.
        sin_TP: fp32 [T, P].
        index_scale: of the weights.
        visible_T: int32 [T] entries a row may see, n(p): the first that many.
        slots_T: int32 [T]; below 0 is a row that sees nothing. Rows of a slot are read together
            where they follow each other.
        page_table: int32 [slots, slot pages], -1 for a page that is not here: its entries are not
            chosen.
        keys: pages of the kv source.
        wanted: what to search for.
        backend: "auto" takes the CUDA body where it fits; any other value is obeyed or refused.

    Raises:
        KernelUnsupported: the named backend cannot search; the text says why.
        ValueError: a shape or dtype that does not fit; the text says which.
    """
    _check(q_TNH, w_TN, cos_TP, sin_TP, visible_T, slots_T, page_table, keys, wanted)
    reason = None if backend == "reference" else why_not_index_cuda(q_TNH, keys, wanted)
    if backend == "cuda" and reason is not None:
        raise KernelUnsupported(f"backend 'cuda' does not fit an index search: {reason}")
    if backend == "reference" or reason is not None:
        q_TNH, w_TN = index_queries(q_TNH, w_TN, cos_TP, sin_TP, index_scale)
        return select_reference(q_TNH, w_TN, visible_T, slots_T, page_table, keys, wanted)
    candidates_TB = wanted.candidates_TB
    queries = Queries(
        q_TNH.contiguous(),
        w_TN.contiguous(),
        cos_TP.contiguous(),
        sin_TP.contiguous(),
        index_scale,
        visible_T.contiguous(),
        slots_T.contiguous(),
        None if candidates_TB is None else candidates_TB.contiguous(),
    )
    return select_cuda(queries, page_table.contiguous(), keys, wanted)


def _check(
    q_TNH: Tensor,
    w_TN: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    visible_T: Tensor,
    slots_T: Tensor,
    page_table: Tensor,
    keys: KeyPages,
    wanted: Wanted,
) -> None:
    num, heads, width = q_TNH.shape
    if width != keys.width:
        raise ValueError(f"queries have {width} values a head, keys {keys.width}")
    shapes = {
        "w": (w_TN, (num, heads)),
        "sin": (sin_TP, tuple(cos_TP.shape)),
        "cos": (cos_TP, (num, cos_TP.shape[1])),
        "visible": (visible_T, (num,)),
        "slots": (slots_T, (num,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, it is {tuple(tensor.shape)}")
    candidates_TB = wanted.candidates_TB
    for name, ints in (("visible", visible_T), ("slots", slots_T), ("page_table", page_table)):
        if ints.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, it is {ints.dtype}")
    if candidates_TB is not None and (
        candidates_TB.dtype != torch.int32 or len(candidates_TB) != num or wanted.num_blocks
    ):
        raise ValueError("candidates must be int32 [T, B], in a search that chooses none itself")
