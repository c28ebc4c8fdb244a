"""Rows on their way into the caches: torch bodies against the model's ops; on a GPU their bits."""

import pytest
import torch
from torch import Tensor

from twinspark.kernels import rounding
from twinspark.kernels.cache_rows import (
    RowSource,
    key_rows,
    latent_rows,
    pool_rows,
    window_rows,
)
from twinspark.kernels.cache_rows import rows as bodies
from twinspark.kernels.cache_rows.source import Format, rounded
from twinspark.kernels.compressor import pool_pair
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.rms_norm import rms_norm
from twinspark.kernels.rope import rotate

EPS = 1e-20
WIDTHS = [(512, 32), (128, 16)]  # of a row, rotated pairs
PAGE_ROWS, RING_ROWS = 4, 32
RULES: dict[Format, tuple[int, int]] = {  # values a value byte holds and a scale byte stands for
    "window": (1, 32),
    "compressed": (2, 16),
    "index_key": (2, 32),
}


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(count: int, width: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, with zeros and ties."""
    rows = torch.randn(count, width, generator=draw(seed))
    rows *= torch.exp(3 * torch.randn(count, 1, generator=draw(seed + 1)))
    rows[:, ::11] = 0.0
    rows[::5] = rows[::5].mul(4).round() / 4
    return rows.bfloat16()


def angles_of(count: int, pairs: int) -> tuple[Tensor, Tensor]:
    angles = 6.3 * torch.rand(count, pairs, generator=draw(2))
    return angles.cos(), angles.sin()


def weights_of(width: int) -> Tensor:
    return (1 + 0.1 * torch.randn(width, generator=draw(3))).bfloat16()


def targets_of(count: int, places: int) -> Tensor:
    targets = torch.randperm(places, generator=draw(4))[:count].int()
    targets[::3] = -1
    return targets


def table(row_format: Format, rule: Format, places: int, width: int, device: str) -> RowSource:
    if row_format == "plain":
        return RowSource("plain", torch.zeros(places, width, dtype=torch.bfloat16, device=device))
    per_value, per_scale = RULES[rule]
    values, scales = width // per_value, width // per_scale
    if rule == "window":
        return RowSource(
            "window",
            torch.zeros(places, values, dtype=torch.uint8, device=device),
            torch.zeros(places, scales, dtype=torch.uint8, device=device),
        )
    shape = (-(-places // PAGE_ROWS), PAGE_ROWS * (values + scales))
    return RowSource(rule, torch.zeros(shape, dtype=torch.uint8, device=device), None, PAGE_ROWS)


def same(first: RowSource, second: RowSource) -> bool:
    if first.scales is not None and second.scales is not None:
        if not torch.equal(first.scales.cpu(), second.scales.cpu()):
            return False
    return torch.equal(first.values.cpu(), second.values.cpu())


def store(
    rule: Format,
    x: Tensor,
    norm: Tensor,
    angles: tuple[Tensor, Tensor],
    into: RowSource,
    to: Tensor,
) -> Tensor | None:
    if rule == "window":
        return window_rows(x, norm, *angles, eps=EPS, store=into, targets_T=to)
    if rule == "compressed":
        latent_rows(x, *angles, store=into, targets_T=to)
    else:
        key_rows(x, norm, *angles, eps=EPS, store=into, targets_T=to)
    return None


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile(arch: str) -> None:
    for source, defines in bodies.cuda_variants(WIDTHS):
        assert compile_cubin(source, arch=arch, defines=defines)[:4] == b"\x7fELF"


@pytest.mark.parametrize("row_format", ["plain", "packed"])
@pytest.mark.parametrize("rule", list(RULES))
def test_rows_are_normed_rotated_rounded_and_stored(rule: Format, row_format: str) -> None:
    width, pairs, count = 128, 16, 13
    x, norm, angles = rows_of(count, width), weights_of(width), angles_of(count, pairs)
    targets = targets_of(count, 20)
    into = table("plain" if row_format == "plain" else rule, rule, 20, width, "cpu")
    out = store(rule, x, norm, angles, into, targets)
    normed = x if rule == "compressed" else rms_norm(x, norm, eps=EPS)
    expected = rounded(rotate(normed, *angles), rule)
    kept = targets >= 0
    assert torch.equal(into.read(targets[kept], torch.bfloat16, width), expected[kept])
    assert out is None or torch.equal(out, expected)
    others = torch.ones(20, dtype=torch.bool)
    others[targets[kept].long()] = False
    assert not into.read(others.nonzero().view(-1), torch.bfloat16, width).any()


def test_latents_of_pairs_across_calls() -> None:
    width, first, count = 128, 7, 12
    kv, gate = (torch.randn(count, width, generator=draw(s)) for s in (5, 6))
    norm, ring = weights_of(width), torch.randn(RING_ROWS, 2 * width, generator=draw(7))
    positions = torch.arange(first, first + count)
    before = ring.clone()
    whole = pooled(kv, gate, norm, positions, ring)
    kept = torch.cat([before[first - 1][None], torch.cat([kv, gate], dim=1)])
    kv_rows, gate_rows = (half.contiguous() for half in kept.chunk(2, dim=1))
    pairs = pool_pair(kv_rows[0::2][:6], gate_rows[0::2][:6], kv_rows[1::2], gate_rows[1::2])
    assert torch.equal(whole[0::2], rms_norm(pairs.bfloat16(), norm, eps=EPS))
    assert not whole[1::2].any()  # rows at even positions complete nothing
    assert torch.equal(ring[first : first + count], torch.cat([kv, gate], dim=1))
    # row by row through the ring: the same
    again = before.clone()
    one = [
        pooled(kv[i : i + 1], gate[i : i + 1], norm, positions[i : i + 1], again)
        for i in range(count)
    ]
    assert torch.equal(torch.cat(one), whole) and torch.equal(again, ring)


def pooled(kv: Tensor, gate: Tensor, norm: Tensor, positions: Tensor, ring: Tensor) -> Tensor:
    odd = positions % 2 == 1
    return pool_rows(
        kv, gate, norm, torch.where(odd, positions // 2, -1).int(), eps=EPS, dtype=torch.bfloat16,
        ring=ring, ring_T=(positions % RING_ROWS).int(),
        previous_T=torch.where(odd, (positions - 1) % RING_ROWS, -1).int(), ring_rows=RING_ROWS,
    )  # fmt: skip


def test_only_the_last_rows_stay_in_a_ring() -> None:
    width, count = 128, 70
    kv, gate = (torch.randn(count, width, generator=draw(s)) for s in (5, 6))
    ring = torch.zeros(RING_ROWS, 2 * width)
    pooled(kv, gate, weights_of(width), torch.arange(count), ring)
    last = torch.arange(count - RING_ROWS, count)
    assert torch.equal(ring[last % RING_ROWS], torch.cat([kv, gate], dim=1)[last])


def test_ratio_one_needs_no_ring() -> None:
    kv, norm = torch.randn(5, 128, generator=draw(5)), weights_of(128)
    targets = torch.tensor([4, -1, 0, 1, -1], dtype=torch.int32)
    latent = pool_rows(kv, None, norm, targets, eps=EPS, dtype=torch.bfloat16)
    expected = rms_norm(kv.bfloat16(), norm, eps=EPS)
    assert torch.equal(latent[[0, 2, 3]], expected[[0, 2, 3]]) and not latent[[1, 4]].any()


def test_float64_rows_stay_float64() -> None:
    x, angles = rows_of(3, 128).double(), angles_of(3, 16)
    norm = weights_of(128).double()
    out = window_rows(x, norm, *angles, eps=EPS)
    expected = rounding.qdq8(rotate(rms_norm(x, norm, eps=EPS), *angles))
    assert out.dtype == torch.float64 and torch.equal(out, expected)


def test_refusals() -> None:
    x, angles = rows_of(3, 128), angles_of(3, 16)
    pages = table("compressed", "compressed", 8, 128, "cpu")
    targets = targets_of(3, 8)
    with pytest.raises(ValueError, match="window rows cannot be stored in .* compressed rows"):
        window_rows(x, weights_of(128), *angles, eps=EPS, store=pages, targets_T=targets)
    with pytest.raises(ValueError, match="come together"):
        window_rows(x, weights_of(128), *angles, eps=EPS, store=pages)
    with pytest.raises(ValueError, match="gates need a ring"):
        kv = x.float()
        pool_rows(kv, kv, weights_of(128), targets, eps=EPS, dtype=torch.bfloat16)


# ---- on a GPU


def gpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("row_format", ["plain", "packed"])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("size", WIDTHS, ids=str)
def test_rows_have_the_bits_of_the_reference_on_gpu(
    size: tuple[int, int], rule: Format, row_format: str, count: int
) -> None:
    width, pairs = size
    x, norm, angles = rows_of(count, width), weights_of(width), angles_of(count, pairs)
    targets = targets_of(count, count + 40)
    kind = "plain" if row_format == "plain" else rule
    ours, theirs = (table(kind, rule, count + 40, width, d) for d in ("cuda", "cpu"))
    out = store(
        rule, x.cuda(), norm.cuda(), (angles[0].cuda(), angles[1].cuda()), ours, targets.cuda()
    )
    # a norm there has another order of sums than here; from it on everything is exact
    normed = x if rule == "compressed" else rms_norm(x.cuda(), norm.cuda(), eps=EPS).cpu()
    turned = rotate(normed, *angles)
    theirs.write(targets, rounded(turned, rule) if kind == "plain" else turned)
    assert same(ours, theirs)
    assert out is None or torch.equal(out.cpu(), rounded(turned, rule))
    if out is not None:
        last = window_rows(x[-1:].cuda(), *gpu(norm, angles[0][-1:], angles[1][-1:]), eps=EPS)
        assert torch.equal(last, out[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 6, 31, 32, 100])
@pytest.mark.parametrize("size", WIDTHS, ids=str)
def test_pooling_does_not_depend_on_the_call_on_gpu(size: tuple[int, int], count: int) -> None:
    width, _ = size
    kv, gate = gpu(*(torch.randn(count, width, generator=draw(s)) for s in (5, 6)))
    norm = weights_of(width).cuda()
    ring = torch.randn(RING_ROWS, 2 * width, generator=draw(7))
    positions = torch.arange(7, 7 + count, device="cuda")
    together, alone, cpu = ring.cuda(), ring.cuda(), ring.clone()
    latent = pooled(kv, gate, norm, positions, together)
    rows = [slice(i, i + 1) for i in range(count)]
    one = torch.cat([pooled(kv[r], gate[r], norm, positions[r], alone) for r in rows])
    assert torch.equal(one, latent) and torch.equal(alone, together)
    expected = pooled(kv.cpu(), gate.cpu(), norm.cpu(), positions.cpu(), cpu)
    assert torch.equal(together.cpu(), cpu)
    torch.testing.assert_close(latent.cpu(), expected, rtol=2**-7, atol=1e-6)
