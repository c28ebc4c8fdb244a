"""From rows of logits to tokens on the device: the same choices as `kernels/choice.py` makes.

What a request adds to a row (penalties, grammar masks) is the engine's and comes before. Letters: R
rows, V vocabulary, S slots, T rows of a step, N requests, K Markov rank. Read next: `reference.py`,
`cuda.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import why_not_launch
from twinspark.kernels.head import cuda, reference


@dataclass(frozen=True)
class RowRules:
    """What each row's choice depends on, as tensors on the device of the logits.

    Attributes:
        temperature_R: fp64; 0 or less is greedy, and then nothing else is read.
        top_k_R: int32, 0 is off.
        top_p_R: fp64, 1 is off.
        log_min_p_R: fp64, -inf is off.
        seed_R2: int32, bits of the low and of the high word of the seed.
        position_R: int32, of the chosen token.
        choice_R: int32, index of the reply.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    log_min_p_R: Tensor
    seed_R2: Tensor
    position_R: Tensor
    choice_R: Tensor

    @classmethod
    def of(
        cls,
        *,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seed: Sequence[int],
        position: Sequence[int],
        choice: Sequence[int],
        device: torch.device | None = None,
    ) -> "RowRules":
        """The rules of rows whose numbers are on the host; seeds are taken mod 2^64."""

        def doubles(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        words = np.array([seed_words(s) for s in seed], np.int32).reshape(-1, 2)
        return cls(
            doubles(temperature),
            ints(top_k),
            doubles(top_p),
            doubles([log_min_p(p) for p in min_p]),
            torch.from_numpy(words).to(device or "cpu"),
            ints(position),
            ints(choice),
        )

    def moved(self, places: int) -> "RowRules":
        """The same rules for tokens that many positions further on."""
        return replace(self, position_R=self.position_R + places)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return (
            self.temperature_R,
            self.top_k_R,
            self.top_p_R,
            self.log_min_p_R,
            self.seed_R2,
            self.position_R,
            self.choice_R,
        )


def log_min_p(min_p: float) -> float:
    """What `log_min_p_R` holds for a least share of the largest probability; 0 is off."""
    return float(np.log(min_p)) if min_p > 0.0 else -np.inf


def seed_words(seed: int) -> tuple[int, int]:
    """What `seed_R2` holds for a seed, which is taken mod 2^64."""
    low, high = np.array([seed % (1 << 64)], np.uint64).view(np.int32).tolist()
    return low, high


def argmax_rows(logits_RV: Tensor, *, banned_V: Tensor | None = None) -> Tensor:
    """The largest logit of every row, equal ones by the lower id.

    Args:
        logits_RV: fp32 [R, V], rows of consecutive values. Not modified.
        banned_V: bool [V], what is never chosen, or None.

    Returns:
        int32 [R]; -1 where an id that is not banned has no number, or the largest is not finite.
    """
    _check(logits_RV, banned_V)
    body = cuda.argmax_rows if cuda.why_not_head_cuda(logits_RV) is None else reference.argmax_rows
    return body(logits_RV, banned_V)


def choose_rows(logits_RV: Tensor, rules: RowRules, *, banned_V: Tensor | None = None) -> Tensor:
    """The keyed choice of every row (design D20, D21), each by its own numbers.

    Kept sets and noise are those of `kernels/choice.py` but for the last bit of exp and log, which
    can decide only where masses or values agree to 2^-35 or to 16 digits.

    Args:
        logits_RV: fp32 [R, V], rows of consecutive values. Not modified.
        rules: of the rows.
        banned_V: bool [V], what is never chosen, or None.

    Returns:
        int32 [R]; -1 where an id that is not banned has no number, or the largest is not finite.
    """
    _check(logits_RV, banned_V)
    for tensor in rules.tensors():
        if len(tensor) != len(logits_RV) or tensor.device != logits_RV.device:
            raise ValueError(
                f"rules are of {len(tensor)} rows on {tensor.device}, logits of {len(logits_RV)} "
                f"on {logits_RV.device}"
            )
    fits = cuda.why_not_head_cuda(logits_RV, keyed=True) is None
    body = cuda.choose_rows if fits else reference.choose_rows
    return body(logits_RV, rules.tensors(), banned_V)


def log_sum_rows(logits_RV: Tensor) -> Tensor:
    """Log of the sum of exp(logit) of every row, fp64 [R], as `kernels/choice.log_sum_exp`."""
    _check(logits_RV, None)
    fits = cuda.why_not_head_cuda(logits_RV) is None
    return (cuda.log_sum_rows if fits else reference.log_sum_rows)(logits_RV)


def accept_rows(
    chosen_T: Tensor, tokens_T: Tensor, first_S: Tensor, count_S: Tensor
) -> tuple[Tensor, Tensor]:
    """How many drafts of every window hold, and what comes after them.

    A window's first row is a token that is certain; each later row is a draft for the position
    after the row before it, kept while it is what that row chose (model specification 5.4).

    Args:
        chosen_T: int32 [T], each row's choice.
        tokens_T: int32 [T], each row's token.
        first_S: int32 [S], first row of a slot's window.
        count_S: int32 [S], its rows, up to 32; 0 for a slot that has none.

    Returns:
        int32 [S] drafts kept, and int32 [S] the choice of the last row that counts, -1 for none.
    """
    for name, tensor in (("chosen", chosen_T), ("tokens", tokens_T), ("first", first_S)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, it is {tensor.dtype}")
    fits = why_not_launch(chosen_T.device) is None
    body = cuda.accept_rows if fits else reference.accept_rows
    return body(chosen_T, tokens_T, first_S, count_S)


def why_not_markov_rows(embed_VK: Tensor, head_VK: Tensor) -> str | None:
    """Why `markov_rows` would wait for the host on these weights' device, or None."""
    if embed_VK.device.type == "cpu":
        return None
    return cuda.why_not_markov(embed_VK.new_empty(0, dtype=torch.float32), embed_VK, head_VK)


def markov_rows(
    base_NV: Tensor,
    tokens_N: Tensor,
    embed_VK: Tensor,
    head_VK: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Logits of one step of a draft: base + embed[token] @ head^T (model specification 5.3).

    Args:
        base_NV: fp32 [N, V], rows of consecutive values, any distance apart.
        tokens_N: int32 [N], entering the step; below 0 adds nothing.
        embed_VK: bf16 [V, K], contiguous.
        head_VK: bf16 [V, K], contiguous.
        out: fp32 [N, V], contiguous, where to put the result, or None.

    Returns:
        fp32 [N, V]; a row's bits depend on that row only.
    """
    if head_VK.shape != embed_VK.shape or base_NV.shape[1] != len(head_VK):
        raise ValueError(
            f"base has {base_NV.shape[1]} ids, embed is {tuple(embed_VK.shape)}, head "
            f"{tuple(head_VK.shape)}"
        )
    if cuda.why_not_markov(base_NV, embed_VK, head_VK) is None:
        return cuda.markov_rows(base_NV, tokens_N, embed_VK, head_VK, out)
    result = reference.markov_rows(base_NV, tokens_N, embed_VK, head_VK)
    return result if out is None else out.copy_(result)


def _check(logits_RV: Tensor, banned_V: Tensor | None) -> None:
    if logits_RV.ndim != 2 or logits_RV.dtype != torch.float32 or logits_RV.stride(1) != 1:
        raise ValueError(
            f"logits must be fp32 [R, V] with consecutive values, they are {logits_RV.dtype} "
            f"{tuple(logits_RV.shape)} with strides {logits_RV.stride()}"
        )
    if banned_V is not None and (
        banned_V.dtype != torch.bool or tuple(banned_V.shape) != (logits_RV.shape[1],)
    ):
        raise ValueError(f"banned must be bool [{logits_RV.shape[1]}]")
