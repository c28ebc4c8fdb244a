"""Choices, acceptance and the Markov stage on CUDA devices: one launch each, nothing waited for.

Arithmetic is in choose.cu and markov.cu. Letters as in `rows.py`. Read next:
`kernels/cuda/launch.py`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import (
    CudaModule,
    on_device,
    why_not_launch,
)

CHOOSE_SOURCE = Path(__file__).with_name("choose.cu")
MARKOV_SOURCE = Path(__file__).with_name("markov.cu")
_CLUSTER = 8
_THREADS = 512
_MOST_IDS = 8 * 16384  # of a keyed choice: what the blocks of a cluster hold
_CHOOSE_SHARED = 92256  # Shared in choose.cu, which checks it
_MARKOV_COLUMNS = 128  # ids a block
_MARKOV_ROWS = 64


def why_not_head_cuda(logits_RV: Tensor, *, keyed: bool = False) -> str | None:
    """Why this body cannot choose from these rows, or None when it can."""
    if keyed and logits_RV.shape[1] > _MOST_IDS:
        return f"a keyed choice takes up to {_MOST_IDS} ids, not {logits_RV.shape[1]}"
    return why_not_launch(logits_RV.device)


def why_not_markov(base_NV: Tensor, embed_VK: Tensor, head_VK: Tensor) -> str | None:
    """Why this body cannot run the Markov stage, or None when it can."""
    weights = (embed_VK, head_VK)
    if base_NV.dtype != torch.float32 or any(w.dtype != torch.bfloat16 for w in weights):
        return "it takes an fp32 base and bf16 weights"
    if head_VK.shape[1] % 32 or not all(w.is_contiguous() for w in weights):
        return f"it takes contiguous weights of a multiple of 32, not {head_VK.shape[1]}"
    return why_not_launch(base_NV.device)


def cuda_variants(rank: int) -> Iterator[tuple[Path, dict[str, int]]]:
    """What the head and a Markov stage of this rank compile: (source, macros)."""
    yield CHOOSE_SOURCE, {}
    yield MARKOV_SOURCE, {"RANK": rank}


@cache
def _module(source: Path, index: int, defines: tuple[tuple[str, int], ...] = ()) -> CudaModule:
    return CudaModule(source, index, dict(defines))


def argmax_rows(logits_RV: Tensor, banned_V: Tensor | None) -> Tensor:
    """See `rows.argmax_rows`."""
    num, vocab = logits_RV.shape
    tokens = torch.empty(num, dtype=torch.int32, device=logits_RV.device)
    args = (logits_RV, banned_V, tokens, vocab, logits_RV.stride(0))
    _launch("head_argmax", num, args, logits_RV.device)
    return tokens


def choose_rows(logits_RV: Tensor, rules: tuple[Tensor, ...], banned_V: Tensor | None) -> Tensor:
    """See `rows.choose_rows`; rules in the order of `RowRules.tensors`."""
    num, vocab = logits_RV.shape
    tokens = torch.empty(num, dtype=torch.int32, device=logits_RV.device)
    args = (logits_RV, banned_V, *rules, tokens, vocab, logits_RV.stride(0))
    _launch("head_choose", num, args, logits_RV.device, shared=_CHOOSE_SHARED)
    return tokens


def log_sum_rows(logits_RV: Tensor) -> Tensor:
    """See `rows.log_sum_rows`."""
    num, vocab = logits_RV.shape
    sums = torch.empty(num, dtype=torch.float64, device=logits_RV.device)
    args = (logits_RV, sums, vocab, logits_RV.stride(0))
    _launch("head_log_sum", num, args, logits_RV.device)
    return sums


def accept_rows(
    chosen_T: Tensor, tokens_T: Tensor, first_S: Tensor, count_S: Tensor
) -> tuple[Tensor, Tensor]:
    """See `rows.accept_rows`."""
    kept, following = torch.empty_like(first_S), torch.empty_like(first_S)
    if len(first_S):
        with on_device(chosen_T.device):
            _module(CHOOSE_SOURCE, chosen_T.device.index).launch(
                "head_accept",
                (len(first_S), 1, 1),
                32,
                (chosen_T, tokens_T, first_S, count_S, kept, following),
            )
    return kept, following


def markov_rows(
    base_NV: Tensor, tokens_N: Tensor, embed_VK: Tensor, head_VK: Tensor, out: Tensor | None
) -> Tensor:
    """See `rows.markov_rows`."""
    (num, vocab), rank = base_NV.shape, head_VK.shape[1]
    if out is None:
        out = torch.empty(num, vocab, dtype=torch.float32, device=base_NV.device)
    module = _module(MARKOV_SOURCE, base_NV.device.index, (("RANK", rank),))
    with on_device(base_NV.device):
        for first in range(0, num, _MARKOV_ROWS):
            rows = slice(first, min(first + _MARKOV_ROWS, num))
            count = rows.stop - first
            module.launch(
                "head_markov",
                (-(-vocab // _MARKOV_COLUMNS), 1, 1),
                256,
                (
                    base_NV[rows], tokens_N[rows], embed_VK, head_VK, out[rows], count, vocab,
                    base_NV.stride(0),
                ),
                shared=-(-count // 8) * 8 * (rank + 8) * 2,
            )  # fmt: skip
    return out


def _launch(
    name: str,
    num: int,
    args: tuple[Tensor | int | None, ...],
    device: torch.device,
    *,
    shared: int = 0,
) -> None:
    if num:
        with on_device(device):
            module = _module(CHOOSE_SOURCE, device.index)
            module.launch(name, (_CLUSTER, num, 1), _THREADS, args, shared=shared)
