"""Optimizer of the demo's training: Muon for hidden matrices, AdamW for the rest.

Muon (momentum, then an approximate orthogonalization of the update by a Newton-Schulz iteration)
is the published recipe; matrices of one shape are stepped together. Read next: `train.py`.
"""

from typing import Any

import torch
from torch import Tensor

MUON = (
    "wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight",
    "compressor.wkv.weight", "wgate.weight", "indexer.wk.weight", "engram.wkv.weight",
    "main_proj.weight", "ffn.w13", "ffn.w2",
)  # fmt: skip
RATES = {"embed.weight": 4e-3, "head.weight": 2e-3}  # AdamW rates by ending; others 2e-3


def is_matrix(name: str) -> bool:
    """Whether Muon steps this parameter."""
    return name.endswith(MUON)


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of every matrix of g [n, o, i]."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Steps bf16 leaves from fp32 masters, grouped by shape."""

    def __init__(self, leaves: list[Tensor], masters: list[Tensor], decay: float) -> None:
        self.decay = decay
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        first: dict[tuple[int, int], list[Tensor]] = {}
        for leaf, master in zip(leaves, masters, strict=True):
            shape = (leaf.shape[-2], leaf.shape[-1])
            self.groups.setdefault(shape, []).append(leaf)
            first.setdefault(shape, []).append(master.reshape(-1, *shape))
        self.master = {s: torch.cat(m).float() for s, m in first.items()}
        self.momentum = {s: torch.zeros_like(m) for s, m in self.master.items()}
        self.push()

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Every leaf with its part of the masters."""
        found = []
        for shape, leaves in self.groups.items():
            counts = [leaf.numel() // (shape[0] * shape[1]) for leaf in leaves]
            parts = self.master[shape].split(counts)
            found += [(leaf, p.view(leaf.shape)) for p, leaf in zip(parts, leaves, strict=True)]
        return found

    def push(self) -> None:
        """Copies the masters into the leaves."""
        pairs = self.views()
        torch._foreach_copy_([leaf.data for leaf, _ in pairs], [view for _, view in pairs])

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        """One step of every matrix at learning rate `rate` (a scalar tensor)."""
        for shape, leaves in self.groups.items():
            g = torch.cat(
                [leaf.grad.reshape(-1, *shape) for leaf in leaves if leaf.grad is not None]
            )
            g = g.float()
            momentum = self.momentum[shape]
            momentum.lerp_(g, 0.05)
            update = orthogonalize(g.lerp(momentum, 0.95)).float()
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            self.master[shape].mul_(1 - rate * self.decay).sub_(update * (rate * scale))
        self.push()
        for leaves in self.groups.values():
            for leaf in leaves:
                leaf.grad = None

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """Masters and momenta, group by group."""
        return [(self.master[s], self.momentum[s]) for s in self.groups]

    def restore(self, state: list[tuple[Tensor, Tensor]]) -> None:
        """Takes back what `state` gave."""
        for shape, (master, momentum) in zip(self.groups, state, strict=True):
            self.master[shape].copy_(master)
            self.momentum[shape].copy_(momentum)
        self.push()


class Optimizer:
    """Both optimizers over a parameter dict whose values become leaves."""

    def __init__(self, params: dict[str, Tensor], names: list[str]) -> None:
        matrices = [n for n in names if is_matrix(n)]
        others = [n for n in names if not is_matrix(n) and not n.endswith("gate.bias")]
        masters = [params[n].float() for n in matrices]
        for n in matrices:
            params[n] = params[n].bfloat16().requires_grad_()
        for n in others:
            params[n] = params[n].float().requires_grad_()
        self.muon = Muon([params[n] for n in matrices], masters, decay=0.1)
        self.rest = [params[n] for n in others]
        cuda = self.rest[0].is_cuda
        by_rate: dict[float, list[Tensor]] = {}
        for n in others:
            rate = next((r for end, r in RATES.items() if n.endswith(end)), 2e-3)
            by_rate.setdefault(rate, []).append(params[n])
        device = self.rest[0].device
        groups = [
            {"params": p, "lr": torch.tensor(r, device=device), "peak": r}
            for r, p in by_rate.items()
        ]
        self.adam = torch.optim.AdamW(
            groups, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda, foreach=False, capturable=cuda
        )

    def step(self, factor: Tensor, muon_rate: float = 0.02) -> Tensor:
        """One step with rates times `factor` (a scalar tensor); returns AdamW's gradient norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        for group in self.adam.param_groups:
            group["lr"].copy_(group["peak"] * factor)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.muon.step(muon_rate * factor)
        return norm

    def masters(self) -> list[tuple[Tensor, Tensor]]:
        """Muon's leaves with their fp32 values."""
        return self.muon.views()

    def clear(self) -> None:
        """Forgets gradients without a step."""
        self.adam.zero_grad(set_to_none=True)
        for leaves in self.muon.groups.values():
            for leaf in leaves:
                leaf.grad = None

    def state(self) -> dict[str, Any]:
        """Everything a later `restore` needs, in the order of the names."""
        return {
            "muon": self.muon.state(),
            "rest": [p.detach() for p in self.rest],
            "adam": [dict(self.adam.state[p]) for p in self.rest],
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave, for the same names."""
        self.muon.restore(state["muon"])
        for leaf, value in zip(self.rest, state["rest"], strict=True):
            leaf.copy_(value)
        kept = [self.adam.state[p] for p in self.rest]
        if all(kept):  # in place: a captured step reads these very tensors
            for now, then in zip(kept, state["adam"], strict=True):
                for key, value in now.items():
                    value.copy_(then[key]) if then else value.zero_()  # saved before its first step
            return
        order = [p for group in self.adam.param_groups for p in group["params"]]
        place = {id(p): i for i, p in enumerate(self.rest)}
        found = [state["adam"][place[id(p)]] for p in order]
        wanted = self.adam.state_dict()
        wanted["state"] = {i: one for i, one in enumerate(found) if one}
        self.adam.load_state_dict(wanted)
