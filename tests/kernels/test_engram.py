"""Engram: primes, multipliers, hash vectors, blocking, gate (trap 20, invariant I13)."""

import math

import numpy as np
import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.errors import ConfigError
from twinspark.kernels import engram
from twinspark.kernels.engram import EngramHash, engram_gate, find_primes, multipliers

TINY_MAP = np.array([i if i < 400 else i - 400 for i in range(512)], np.int32)
LOOK_BACK = 3


def _tiny(pad_id: int = 2) -> EngramHash:
    return EngramHash(
        [1, 4],
        [12458, 13416],
        max_ngram=4,
        num_heads=4,
        vocab_size=1000,
        compressed_vocab_size=400,
        pad_id=pad_id,
    )


def _rows(
    tiny: EngramHash, ids: list[int], history: tuple[int, ...] = (), image: int = -1
) -> np.ndarray:
    """Hash a run of tokens whose earlier tokens are `history`, nothing before them."""
    missing = LOOK_BACK - len(history)
    padded = np.array([0] * missing + list(history) + ids, np.int64)
    blocked = padded == image
    blocked[:missing] = True
    return tiny.rows(TINY_MAP, padded, blocked)


def test_tiny_primes() -> None:
    layers = find_primes(2, 3, 4, 1000)
    assert layers == [
        [1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069],
        [1087, 1091, 1093, 1097, 1103, 1109, 1117, 1123, 1129, 1151, 1153, 1163],
    ]


def test_full_size_primes() -> None:
    first, second = find_primes(2, 3, 8, 16_000_000)
    assert first[:4] == [16000057, 16000079, 16000081, 16000097] and first[-1] == 16000463
    assert second[:2] == [16000477, 16000487] and second[-1] == 16000889
    assert (sum(first), sum(second)) == (384006168, 384016682)
    assert len(set(first + second)) == 48


@pytest.mark.parametrize(
    ("layer", "vocab", "expected"),
    [
        (1, 99092, [76632096046245, 4839876093313, 35959672319349, 73987337458391]),
        (14, 99092, [67716810739261, 51510806800915, 30921347202721, 82619226485591]),
        (1, 400, [18984069153536581, 1198982504596559, 8908289623672409, 18328883108567563]),
        (4, 400, [20378323963399201, 1248012217874625, 18246170261325197, 4695688200551669]),
    ],
)
def test_multipliers(layer: int, vocab: int, expected: list[int]) -> None:
    assert multipliers(layer, vocab, 4) == expected
    bound = (2**63 - 1) // vocab // 2
    assert all(m % 2 == 1 and m < 2 * bound + 1 for m in expected)
    assert max(expected) * (vocab - 1) < 2**63


def test_shipped_constants_are_the_drawn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {layer: multipliers(layer, 99092, 4) for layer in (1, 14)}
    monkeypatch.setattr(engram, "_SHIPPED", {})
    assert {layer: multipliers(layer, 99092, 4) for layer in (1, 14)} == shipped


def test_tiny_hash_vectors() -> None:
    """Model specification 3.9, row ids with offsets."""
    rows = _rows(_tiny(), [3, 7, 450, 11, 20])
    assert rows.shape == (5, 2, 12) and rows.dtype == np.int64
    expected = {
        (0, 0): [984, 1749, 2106, 3722, 4073, 5948, 6779, 7250, 9190, 9302, 10950, 12281],
        (0, 1): [340, 2113, 2207, 4332, 4805, 6058, 7244, 8036, 9872, 10046, 11595, 12314],
        (4, 0): [622, 1331, 2521, 3920, 4320, 5424, 6608, 8009, 9022, 9317, 11094, 12098],
        (4, 1): [453, 1831, 3084, 3336, 4997, 6060, 7622, 8343, 9040, 10531, 11378, 12808],
    }
    for (position, layer), row in expected.items():
        assert rows[position, layer].tolist() == row


def _by_hand(ids: list[int], blocked: list[bool], position: int, layer: int) -> list[int]:
    """The specification's loop for one token, in Python integers."""
    primes = find_primes(2, 3, 4, 1000)[layer]
    factors = multipliers((1, 4)[layer], 400, 4)
    roll, hidden, out, offset = 0, False, [], 0
    for s in range(4):
        hidden = hidden or position - s < 0 or blocked[position - s]
        value = 2 if hidden else int(TINY_MAP[ids[position - s]])
        roll ^= value * factors[s]
        for h in range(4 if s else 0):
            prime = primes[(s - 1) * 4 + h]
            out.append(roll % prime + offset)
            offset += prime
    return out


def test_trap_20_blocking_is_sticky() -> None:
    ids = [3, 7, 450, 510, 11, 20, 33, 44, 55]
    rows = _rows(_tiny(), ids, image=510)
    blocked = [i == 510 for i in ids]
    for position in range(len(ids)):
        for layer in range(2):
            expected = _by_hand(ids, blocked, position, layer)
            assert rows[position, layer].tolist() == expected
    # what lies before the image no longer matters to the three tokens behind it
    other = _rows(_tiny(), [9, 9, 9, *ids[3:]], image=510)
    assert np.array_equal(rows[3:], other[3:])
    # but a hole that only blocks its own place would let it through
    assert not np.array_equal(rows[5], _rows(_tiny(), ids)[5])


def test_trap_20_pad_id_is_mapped() -> None:
    mapped, raw = _rows(_tiny(), [3]), _rows(_tiny(pad_id=7), [3])
    assert not np.array_equal(mapped, raw)
    factors = multipliers(1, 400, 4)
    roll = (3 * factors[0]) ^ (2 * factors[1])
    assert mapped[0, 0, 0] == roll % 1009


def test_trap_20_columns_are_order_then_head_with_offsets_per_layer() -> None:
    rows = _rows(_tiny(), list(range(3, 203)))
    for layer, primes in enumerate(find_primes(2, 3, 4, 1000)):
        offsets = np.cumsum([0, *primes])
        assert (rows[:, layer] >= offsets[:-1]).all() and (rows[:, layer] < offsets[1:]).all()


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 7])
def test_i13_chunk_boundaries_look_back(cut: int) -> None:
    ids = [3, 7, 450, 11, 20, 88, 497, 5, 6]
    whole = _rows(_tiny(), ids)
    before, after = ids[:cut], ids[cut:]
    parts = [_rows(_tiny(), before), _rows(_tiny(), after, tuple(before[-LOOK_BACK:]))]
    assert np.array_equal(np.concatenate(parts), whole)
    one_by_one = [
        _rows(_tiny(), [token], tuple(ids[max(0, i - LOOK_BACK) : i]))
        for i, token in enumerate(ids)
    ]
    assert np.array_equal(np.concatenate(one_by_one), whole)


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 4 is 13417, .* add up to 13416"):
        EngramHash(
            [1, 4],
            [12458, 13417],
            max_ngram=4,
            num_heads=4,
            vocab_size=1000,
            compressed_vocab_size=400,
            pad_id=2,
        )


def _gate_inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(40, 4, 128, generator=generator) * 3).to(dtype)
    key = torch.randn(40, 4, 128, generator=generator).to(dtype)
    value = torch.randn(40, 128, generator=generator).to(dtype)
    return x, key, value, 1 + 0.1 * torch.randn(4, 128, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gate_rows_stand_alone(dtype: torch.dtype) -> None:
    x, key, value, weight = _gate_inputs(dtype)
    blocked = torch.arange(40) % 5 == 0
    assert_rows_stand_alone(
        lambda a, b, c, d: engram_gate(a, b, c, weight, d, eps=1e-20), x, key, value, blocked
    )


def test_gate_by_hand() -> None:
    x, key, value, weight = _gate_inputs()
    got = engram_gate(x.double(), key.double(), value.double(), weight.double(), eps=1e-20)
    for row in (0, 7, 39):
        for stream in range(4):
            xs, ks = x[row, stream].double(), key[row, stream].double()
            dot = float((xs * weight[stream].double() * ks).sum())
            # per-stream root mean squares, not one over all streams
            dot *= float(torch.rsqrt(xs.square().mean()) * torch.rsqrt(ks.square().mean()))
            dot *= 128**-0.5
            root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
            gate = 1 / (1 + math.exp(-root))
            expected = xs + gate * value[row].double()
            torch.testing.assert_close(got[row, stream], expected, rtol=0, atol=1e-12)
    narrow = engram_gate(x, key, value, weight, eps=1e-20)
    assert narrow.dtype == torch.bfloat16
    assert (narrow != got.bfloat16()).float().mean() < 0.002


def test_trap_20_floor_and_sign_of_the_root() -> None:
    zero = torch.zeros(1, 4, 128, dtype=torch.float64)
    value = torch.ones(1, 128, dtype=torch.float64)
    weight = torch.ones(4, 128, dtype=torch.float64)
    out = engram_gate(zero, zero, value, weight, eps=1e-20)
    # dot = +0: the root is +1e-3, the gate 0.50025 and not a half
    assert out[0, 0, 0].item() == pytest.approx(0.50025, abs=1e-7)
    x = zero.clone()
    x[..., 0] = 1.0
    out = engram_gate(x, -1e-9 * x, value, weight, eps=1e-20)
    assert out[0, 0, 1].item() < 0.5


def test_trap_20_image_rows_take_nothing_in() -> None:
    x, key, value, weight = _gate_inputs()
    blocked = torch.zeros(40, dtype=torch.bool)
    blocked[[3, 20]] = True
    out = engram_gate(x, key, value, weight, blocked, eps=1e-20)
    free = engram_gate(x, key, value, weight, eps=1e-20)
    assert torch.equal(out[blocked], x[blocked]) and torch.equal(out[~blocked], free[~blocked])
