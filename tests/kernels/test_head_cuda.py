"""Choices from rows of logits: the reference on the CPU, and CUDA against it on a GPU."""

import numpy as np
import pytest
import torch

from twinspark.kernels.choice import keyed_choice, log_sum_exp
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.head import (
    RowRules,
    accept_rows,
    argmax_rows,
    choose_rows,
    log_sum_rows,
    markov_rows,
)
from twinspark.kernels.head.cuda import cuda_variants

NAMES = (b"head_argmax", b"head_choose", b"head_log_sum", b"head_accept", b"head_markov")
KINDS = ("normal", "ties", "equal", "peaky", "wide", "close")
NUMBERS: tuple[dict[str, float], ...] = (
    {},
    {"top_p": 0.95},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 0.3, "top_p": 0.5},
    {"temperature": 2.5, "top_p": 0.99, "min_p": 0.01},
    {"temperature": 0.0},
    {"top_p": 0.0},
    {"top_k": 1},
    {"top_k": 1000, "top_p": 0.999},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
    # numbers for which masses and limits are worked out in float64 only
    {"temperature": 100.0, "top_p": 0.9},
    {"temperature": 0.001, "top_p": 0.9, "min_p": 0.01},
    {"min_p": 1.0},
)


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(KINDS.index(kind))
    x = torch.randn(rows, vocab, generator=g) * 3
    if kind == "ties":
        return x.round()
    if kind == "equal":
        return torch.full_like(x, 1.5)
    if kind == "close":  # more in one bin of depth than are ranked, each value many times
        return 20 + (torch.rand(rows, vocab, generator=g) * 300).floor() * 2.0**-19
    if kind == "peaky":
        x[torch.arange(rows), torch.randint(0, vocab, (rows,), generator=g)] += 12
    return x * 6 if kind == "wide" else x


def numbers_of(rows: int, **changes: float) -> dict[str, list[float]]:
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    return {name: [value] * rows for name, value in base.items()} | {
        "seed": [row * (1 << 40) - 1 for row in range(rows)],
        "position": list(range(3, 3 + rows)),
        "choice": [row % 3 for row in range(rows)],
    }


def rules_of(rows: int, device: str = "cpu", **changes: float) -> RowRules:
    numbers = numbers_of(rows, **changes)
    numbers["top_k"] = [int(k) for k in numbers["top_k"]]
    return RowRules.of(**numbers, device=torch.device(device))  # type: ignore[arg-type]


def odd_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with every oddity, and a mask that hides some of them."""
    x = logits_of("ties", 8, 1001)
    x[1, 5], x[2, 7], x[3] = float("nan"), float("inf"), -float("inf")
    x[4, 8:] = -float("inf")
    x[5], x[5, 3] = 0.0, -0.0
    x[6, 3] = float("nan")  # banned
    banned = torch.zeros(1001, dtype=torch.bool)
    banned[::3] = True
    return x, banned


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile(arch: str) -> None:
    cubins = [compile_cubin(s, arch=arch, defines=d) for s, d in cuda_variants(256)]
    assert all(any(name in cubin for cubin in cubins) for name in NAMES)


def test_argmax_of_odd_rows() -> None:
    x, banned = odd_rows()
    plain = argmax_rows(x).tolist()
    assert plain[1:4] == [-1, -1, -1] and plain[5] == 0 and plain[6] == -1
    assert plain[4] < 8 and plain[0] == int(x[0].argmax())
    masked = argmax_rows(x, banned_V=banned).tolist()
    assert all(token % 3 for token in masked if token >= 0)
    assert masked[1:4] == [-1, -1, -1] and masked[5] == 1 and masked[6] >= 0


@pytest.mark.parametrize("changes", NUMBERS, ids=str)
def test_reference_is_the_keyed_choice(changes: dict[str, float]) -> None:
    x = logits_of("normal", 4, 600)
    numbers = numbers_of(4, **changes)
    expected = [
        keyed_choice(
            x[row].numpy(),
            int(numbers["position"][row]),
            seed=int(numbers["seed"][row]),
            temperature=numbers["temperature"][row],
            top_k=int(numbers["top_k"][row]),
            top_p=numbers["top_p"][row],
            min_p=numbers["min_p"][row],
            choice=int(numbers["choice"][row]),
        )
        for row in range(4)
    ]
    assert choose_rows(x, rules_of(4, **changes)).tolist() == expected


def test_seeds_keep_all_their_bits() -> None:
    rules = RowRules.of(
        temperature=[1.0] * 3, top_k=[0] * 3, top_p=[1.0] * 3, min_p=[0.0, 0.5, 1.0],
        seed=[-1, (1 << 63) + 5, 1 << 64], position=[1] * 3, choice=[0] * 3,
    )  # fmt: skip
    assert rules.seed_R2.tolist() == [[-1, -1], [5, -(1 << 31)], [0, 0]]
    assert rules.log_min_p_R.tolist() == [-float("inf"), float(np.log(0.5)), 0.0]


def test_sums_are_those_of_the_host() -> None:
    x, _ = odd_rows()
    found = log_sum_rows(x).tolist()
    expected = [log_sum_exp(row) for row in x.numpy()]
    assert [repr(v) for v in found] == [repr(v) for v in expected]


def test_windows_are_walked() -> None:
    chosen = torch.tensor([5, 6, 7, 9, 1, 2], dtype=torch.int32)
    tokens = torch.tensor([4, 5, 6, 8, 3, 1], dtype=torch.int32)
    first, count = torch.tensor([0, 4, 0], dtype=torch.int32), torch.tensor([4, 2, 0]).int()
    kept, following = accept_rows(chosen, tokens, first, count)
    assert kept.tolist() == [2, 1, 0] and following.tolist() == [7, 2, -1]


def test_markov_rows_add_a_product() -> None:
    g = torch.Generator().manual_seed(0)
    base = torch.randn(6, 512, generator=g)
    embed, head = (torch.randn(512, 32, generator=g).bfloat16() for _ in range(2))
    tokens = torch.tensor([3, -1, 511], dtype=torch.int32)
    out = torch.full((3, 512), float("nan"))
    found = markov_rows(base[::2], tokens, embed, head, out=out)
    memory = embed[tokens.long().clamp(min=0)].double()
    memory[1] = 0
    exact = base[::2].double() + memory @ head.double().T
    assert found is out and torch.allclose(found.double(), exact, rtol=0, atol=1e-4)


def test_wrong_calls() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="logits must be fp32"):
        argmax_rows(x.double())
    with pytest.raises(ValueError, match="logits must be fp32"):
        argmax_rows(x.T)
    with pytest.raises(ValueError, match=r"banned must be bool \[8\]"):
        argmax_rows(x, banned_V=torch.zeros(7, dtype=torch.bool))
    with pytest.raises(ValueError, match="rules are of 3 rows"):
        choose_rows(x, rules_of(3))
    with pytest.raises(ValueError, match="chosen must be int32"):
        accept_rows(*[torch.zeros(1, dtype=torch.int64)] * 4)
    with pytest.raises(ValueError, match="base has 8 ids"):
        markov_rows(x, torch.zeros(2).int(), *[torch.zeros(9, 32).bfloat16()] * 2)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [512, 1001, 4096, 129280])
def test_argmax_on_gpu(vocab: int) -> None:
    x, banned = odd_rows()
    x = x[:, torch.arange(vocab) % 1001].contiguous()
    banned = banned[torch.arange(vocab) % 1001]
    for mask in (None, banned):
        on_gpu = None if mask is None else mask.cuda()
        found = argmax_rows(x.cuda(), banned_V=on_gpu).cpu()
        assert torch.equal(found, argmax_rows(x, banned_V=mask))
        wide = torch.zeros(8, 2 * vocab + 1, device="cuda")
        wide[:, 1 : vocab + 1] = x.cuda()
        assert torch.equal(argmax_rows(wide[:, 1 : vocab + 1], banned_V=on_gpu).cpu(), found)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [512, 129280])
@pytest.mark.parametrize("kind", KINDS)
def test_keyed_choice_on_gpu(kind: str, vocab: int) -> None:
    rows = 4 if vocab == 512 else 2
    x = logits_of(kind, rows, vocab)
    for changes in NUMBERS:
        expected = choose_rows(x, rules_of(rows, **changes))
        found = choose_rows(x.cuda(), rules_of(rows, "cuda", **changes)).cpu()
        assert torch.equal(found, expected), changes


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [7, 1001, 131072])
@pytest.mark.parametrize(
    "changes", [{"top_p": 0.6}, {"top_k": 30}, {"min_p": 0.4}, {"top_k": 50, "top_p": 0.8}], ids=str
)
def test_what_is_kept_on_gpu(vocab: int, changes: dict[str, float]) -> None:
    """The same row at so many places that each of the few ids that are kept is chosen at some."""
    x = torch.full((1, vocab), -40.0)
    g = torch.Generator().manual_seed(vocab)
    some = torch.randperm(vocab, generator=g)[:60]  # nearly as likely as each other
    x[0, some] = 8 + 0.3 * torch.rand(len(some), generator=g)
    x = x.expand(1024, vocab).contiguous()
    expected = choose_rows(x, rules_of(1024, **changes))
    assert len(expected.unique()) >= min(vocab, 20) // 2
    assert torch.equal(choose_rows(x.cuda(), rules_of(1024, "cuda", **changes)).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1e-12, 1e-16, 1e-20, 1e-38, 1e-50, 1e-100])
def test_ties_at_tiny_temperatures_on_gpu(temperature: float) -> None:
    """Float64 loses some or all of the noise beside a logit over so little."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    x[:, [3, 7, 200, 900]] = x.max() + 1
    for changes in ({}, {"top_p": 0.9}, {"min_p": 0.1}):
        numbers = {"temperature": temperature, **changes}
        expected = choose_rows(x, rules_of(64, **numbers))
        found = choose_rows(x.cuda(), rules_of(64, "cuda", **numbers)).cpu()
        assert torch.equal(found, expected) and (found >= 0).all(), changes


@pytest.mark.gpu
def test_odd_rows_on_gpu() -> None:
    x, banned = odd_rows()
    found = choose_rows(x.cuda(), rules_of(8, "cuda", top_p=0.9), banned_V=banned.cuda()).cpu()
    assert torch.equal(found, choose_rows(x, rules_of(8, top_p=0.9), banned_V=banned))
    sums, expected = log_sum_rows(x.cuda()).cpu(), log_sum_rows(x)
    assert torch.allclose(sums, expected, rtol=1e-15, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_call() -> None:
    x, rules = logits_of("peaky", 64, 129280).cuda(), rules_of(64, "cuda", top_p=0.95)
    together, best = choose_rows(x, rules), argmax_rows(x)
    for row in range(64):
        own = slice(row, row + 1)
        alone = choose_rows(x[own], RowRules(*(t[own] for t in rules.tensors())))
        assert alone == together[row] and argmax_rows(x[own]) == best[row]


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "rank"), [(512, 32), (4096, 64), (129280, 256)])
def test_markov_rows_on_gpu(vocab: int, rank: int) -> None:
    g = torch.Generator().manual_seed(2)
    base = torch.randn(70 * 5, vocab, generator=g).cuda()
    embed, head = (torch.randn(vocab, rank, generator=g).bfloat16().cuda() for _ in range(2))
    tokens = torch.randint(0, vocab, (70,), generator=g).int().cuda()
    tokens[3] = -1
    out = torch.full((70, vocab), float("nan"), device="cuda")
    found = markov_rows(base[2::5], tokens, embed, head, out=out)
    memory = embed[tokens.long().clamp(min=0)].double()
    memory[3] = 0
    exact = base[2::5].double() + memory @ head.double().T
    # sums of `rank` products near 1 in fp32
    assert (found - exact).abs().max() < 1e-6 * rank * 4
    for row in (0, 3, 9, 69):
        own = slice(row, row + 1)
        alone = markov_rows(base[2::5][own], tokens[own], embed, head)
        assert torch.equal(alone[0], found[row])


@pytest.mark.gpu
def test_a_captured_round_follows_its_rows() -> None:
    x, rules = logits_of("normal", 6, 4096).cuda(), rules_of(6, "cuda", top_p=0.9)
    tokens = torch.zeros(6, dtype=torch.int32, device="cuda")
    first, count = (torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([0, 3], [3, 3]))

    def walk() -> tuple[torch.Tensor, ...]:
        chosen = choose_rows(x, rules)
        return (chosen, argmax_rows(x), *accept_rows(chosen, tokens, first, count))

    walk()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = walk()
    for seed in range(4):
        x.copy_(torch.randn(6, 4096, generator=torch.Generator().manual_seed(seed)))
        rules.position_R.add_(1)
        tokens[1:] = choose_rows(x, rules)[:-1]
        tokens[2] += seed % 2
        graph.replay()
        for kept, eager in zip(captured, walk(), strict=True):
            assert torch.equal(kept, eager)
