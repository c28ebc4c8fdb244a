"""Attention over a list of rows (traps 8, 10)."""

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.rope import inverse_frequencies, rope
from twinspark.kernels.sparse_attention import sparse_attention

SCALE = 128**-0.5


def _inputs(
    heads: int, listed: int, size: int = 128, num: int = 40, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * listed)
    q = torch.randn(num, heads, size, generator=generator).to(dtype) * 2
    rows = torch.randn(num, listed, size, generator=generator).to(dtype)
    valid = torch.rand(num, listed, generator=generator) > 0.3
    valid[:, -1] = True
    return q, rows, valid, torch.randn(heads, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("heads", "listed", "size"),
    [
        (2, 24, 128),  # TINY, a shard's heads
        (2, 128, 128),  # the demo model
        (4, 128, 128),
        (1, 40, 128),
        (2, 69, 128),  # a draft block: window and block rows
        (16, 640, 512),  # full size, a quarter of the heads
    ],
)
def test_rows_stand_alone(heads: int, listed: int, size: int, dtype: torch.dtype) -> None:
    q, rows, valid, sink = _inputs(heads, listed, size, dtype=dtype)
    counts = (1, 2, 6, 9, 40) if size > 128 else (1, 2, 3, 6, 8, 9, 17, 40)
    assert_rows_stand_alone(
        lambda *args: sparse_attention(*args, sink, scale=SCALE), q, rows, valid, counts=counts
    )


def _by_hand(
    q: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Model specification 3.8 in float64, entry by entry."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            logits = [
                (float(q[t, h].double() @ rows[t, k].double()) * SCALE, k)
                for k in range(rows.shape[1])
                if valid[t, k]
            ]
            peak = max([a for a, _ in logits] + [float(sink[h])])
            weights = [(torch.tensor(a - peak).double().exp(), k) for a, k in logits]
            total = sum(w for w, _ in weights) + (sink[h].double() - peak).exp()
            for weight, k in weights:
                out[t, h] += weight / total * rows[t, k].double()
    return out


def test_values() -> None:
    q, rows, valid, sink = _inputs(3, 20, num=4)
    expected = _by_hand(q, rows, valid, sink)
    wide = sparse_attention(q.double(), rows.double(), valid, sink.double(), scale=SCALE)
    torch.testing.assert_close(wide, expected, rtol=0, atol=2e-7)  # logits of the hand are fp32
    got = sparse_attention(q, rows, valid, sink, scale=SCALE)
    assert got.dtype == torch.bfloat16
    # one bf16 rounding, half a step of 2^-8, on values up to 2
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-5)


def test_trap_10_sink_is_in_the_denominator_only() -> None:
    q = torch.zeros(1, 1, 128).bfloat16()
    rows = torch.ones(1, 3, 128).bfloat16()
    valid = torch.ones(1, 3, dtype=torch.bool)
    out = sparse_attention(q, rows, valid, torch.zeros(1), scale=SCALE)
    assert torch.equal(out, torch.full((1, 1, 128), 0.75).bfloat16())
    padded_head = torch.tensor([-torch.inf])
    out = sparse_attention(q, rows, valid, padded_head, scale=SCALE)
    assert torch.equal(out, torch.ones(1, 1, 128).bfloat16())
    # a sink far above everything takes all the weight, without overflow
    out = sparse_attention(q, rows, valid, torch.tensor([200.0]), scale=SCALE)
    assert torch.equal(out, torch.zeros(1, 1, 128).bfloat16())


def test_no_valid_entry_gives_zero() -> None:
    q, rows, valid, sink = _inputs(2, 10, num=3)
    valid[1] = False
    out = sparse_attention(q, rows, valid, sink, scale=SCALE)
    assert torch.equal(out[1], torch.zeros(2, 128).bfloat16())
    assert torch.isfinite(out).all()


def test_what_stands_in_invalid_places_does_not_matter() -> None:
    q, rows, valid, sink = _inputs(2, 24, num=5)
    other = torch.where(valid[..., None], rows, torch.tensor(321.0).bfloat16())
    out = sparse_attention(q, rows, valid, sink, scale=SCALE)
    assert torch.equal(sparse_attention(q, other, valid, sink, scale=SCALE), out)


def test_a_row_listed_twice_counts_twice() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, 128, generator=generator, dtype=torch.float64)
    rows = torch.randn(1, 2, 128, generator=generator, dtype=torch.float64)
    sink = torch.tensor([-torch.inf], dtype=torch.float64)
    twice = rows[:, [0, 0, 1]]
    valid = torch.ones(1, 3, dtype=torch.bool)
    a = (q[0, 0] @ rows[0].T) * SCALE
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64) * a.exp()
    expected = (weights / weights.sum()) @ rows[0]
    got = sparse_attention(q, twice, valid, sink, scale=SCALE)
    torch.testing.assert_close(got[0, 0], expected, rtol=0, atol=1e-13)


def test_trap_08_rotated_values_need_the_inverse_rotation() -> None:
    """Against dense attention whose values are turned by the distance to the query instead.

    In a frame that turns with the query, a row at s is its latent rotated by s - p. Scores of
    rotated queries and rows depend on that distance only, so both ways must agree at p >= 1000.
    """
    freq = inverse_frequencies(64, 160000.0, factor=16.0, original_max_positions=65536)
    generator = torch.Generator().manual_seed(7)
    query_position, num = 1234, 16
    positions = query_position - num + 1 + torch.arange(num)
    q = torch.randn(1, 2, 128, generator=generator, dtype=torch.float64)
    latent = torch.randn(num, 128, generator=generator, dtype=torch.float64)
    sink = torch.randn(2, generator=generator, dtype=torch.float64)
    here = torch.tensor([query_position])
    rows = rope(latent, positions, freq)[None]
    valid = torch.ones(1, num, dtype=torch.bool)
    turned = sparse_attention(rope(q, here, freq), rows, valid, sink, scale=SCALE)
    got = rope(turned, here, freq, inverse=True)
    relative = rope(latent, query_position - positions, freq, inverse=True)
    logits = (q[0] @ relative.T) * SCALE
    weights = logits.exp() / (logits.exp().sum(1, keepdim=True) + sink.exp()[:, None])
    # the table's angles are fp32 numbers, off by 2^-14 at 1234
    torch.testing.assert_close(got[0], weights @ relative, rtol=0, atol=1e-3)
    assert (turned[0] - weights @ relative).abs().max() > 0.1  # what forgetting it looks like
