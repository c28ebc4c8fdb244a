"""Choices, acceptance and the Markov stage in plain torch and numpy: the specification.

Reads rows on the host. Letters as in `rows.py`. Read next: `cuda.py`.
"""

import numpy as np
import torch
from torch import Tensor

from twinspark.kernels.choice import keyed_choice, log_sum_exp
from twinspark.kernels.matmul import matmul, prepare_matrix


def argmax_rows(logits_RV: Tensor, banned_V: Tensor | None) -> Tensor:
    """See `rows.argmax_rows`."""
    allowed_RV = _allowed(logits_RV, banned_V)
    best_R = torch.from_numpy(allowed_RV.cpu().numpy().argmax(1)).to(logits_RV.device)
    is_choice_R = allowed_RV.gather(1, best_R[:, None])[:, 0].isfinite()
    return torch.where(is_choice_R, best_R, -1).to(torch.int32)


def choose_rows(logits_RV: Tensor, rules: tuple[Tensor, ...], banned_V: Tensor | None) -> Tensor:
    """See `rows.choose_rows`; rules in the order of `RowRules.tensors`."""
    best_R = argmax_rows(logits_RV, banned_V)
    rows = _allowed(logits_RV, banned_V).cpu().numpy()
    temperature, top_k, top_p, log_min_p, seed, position, choice = (t.cpu().numpy() for t in rules)
    seeds = np.ascontiguousarray(seed).view(np.uint64)[:, 0]
    tokens = best_R.tolist()
    for r, best in enumerate(tokens):
        if best >= 0:
            tokens[r] = keyed_choice(
                rows[r],
                int(position[r]),
                seed=int(seeds[r]),
                temperature=float(temperature[r]),
                top_k=int(top_k[r]),
                top_p=float(top_p[r]),
                min_p=float(np.exp(log_min_p[r])),
                choice=int(choice[r]),
            )
    return torch.tensor(tokens, dtype=torch.int32, device=logits_RV.device)


def log_sum_rows(logits_RV: Tensor) -> Tensor:
    """See `rows.log_sum_rows`."""
    sums = [log_sum_exp(row) for row in logits_RV.cpu().numpy()]
    return torch.tensor(sums, dtype=torch.float64, device=logits_RV.device)


def accept_rows(
    chosen_T: Tensor, tokens_T: Tensor, first_S: Tensor, count_S: Tensor
) -> tuple[Tensor, Tensor]:
    """See `rows.accept_rows`."""
    chosen, tokens = chosen_T.tolist(), tokens_T.tolist()
    kept, following = [], []
    for first, count in zip(first_S.tolist(), count_S.tolist(), strict=True):
        num = 0
        while num + 1 < count and chosen[first + num] == tokens[first + num + 1]:
            num += 1
        kept.append(num)
        following.append(chosen[first + num] if count else -1)
    device = chosen_T.device
    return (
        torch.tensor(kept, dtype=torch.int32, device=device),
        torch.tensor(following, dtype=torch.int32, device=device),
    )


def markov_rows(base_NV: Tensor, tokens_N: Tensor, embed_VK: Tensor, head_VK: Tensor) -> Tensor:
    """See `rows.markov_rows`."""
    memory_NK = embed_VK[tokens_N.to(torch.int64).clamp(min=0)].clone()
    memory_NK.masked_fill_((tokens_N < 0)[:, None], 0)
    return base_NV + matmul(memory_NK, prepare_matrix(head_VK, base_NV.dtype))


def _allowed(logits_RV: Tensor, banned_V: Tensor | None) -> Tensor:
    return logits_RV if banned_V is None else logits_RV.masked_fill(banned_V, -torch.inf)
