"""Products with plain weights: one summation order, whatever else is in the call."""

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone

from twinspark.kernels.matmul import CHUNK_INPUTS, RowMatrix, matmul, prepare_matrix


def _case(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, RowMatrix]:
    generator = torch.Generator().manual_seed(inputs * 7 + outputs)
    x = torch.randn(40, inputs, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return x, prepare_matrix(weight, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (128, 6),  # a router of 6 experts: narrow shapes take other library paths
        (256, 3),  # a draft router
        (128, 1),  # the confidence head
        (256, 2),  # index weights of two heads
        (512, 8),
        (1024, 24),  # hyper-connections: two chunks
        (128, 384),
        (640, 24),  # a short last chunk
        (300, 130),  # no multiple of anything
        (2048, 256),  # four chunks
        (256, 4096),  # a head
    ],
)
def test_rows_stand_alone(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, matrix = _case(inputs, outputs, dtype)
    counts = (1, 2, 6, 7, 8, 9, 31, 40) if outputs > 1000 else ()
    assert_rows_stand_alone(lambda rows: matmul(rows, matrix), x, counts=counts)


@pytest.mark.parametrize("outputs", [1, 6, 8, 24, 384])
def test_bits_do_not_depend_on_alignment(outputs: int) -> None:
    x, matrix = _case(256, outputs, torch.float32)
    expected = matmul(x, matrix)
    for shift in (1, 2, 3, 5, 8):
        buffer = torch.empty(x.numel() + 16)
        moved = buffer[shift : shift + x.numel()].view(x.shape).copy_(x)
        assert torch.equal(matmul(moved, matrix), expected)
        chunk = matrix.chunks[0]
        buffer = torch.empty(chunk.numel() + 16)
        away = buffer[shift : shift + chunk.numel()].view(chunk.shape).copy_(chunk)
        shifted = RowMatrix((away,), matrix.in_features, matrix.out_features)
        assert torch.equal(matmul(x, shifted), expected)
    wide = torch.zeros(40, 300)
    wide[:, 20:276] = x
    assert torch.equal(matmul(wide[:, 20:276], matrix), expected)


def test_chunk_sums_are_added_ascending() -> None:
    x, matrix = _case(2048, 32, torch.float32)
    tile = x[:8]
    parts = [
        torch.mm(tile[:, number * CHUNK_INPUTS :][:, : len(weight)], weight)
        for number, weight in enumerate(matrix.chunks)
    ]
    assert len(parts) == 4
    ascending = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(matmul(tile, matrix), ascending)
    assert not torch.equal(ascending, ((parts[3] + parts[2]) + parts[1]) + parts[0])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-6), (torch.float64, 1e-14)],  # sqrt(K) roundings of 6e-8, 1e-16
)
def test_values(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(11, 1100, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(70, 1100, generator=generator, dtype=torch.float64).to(dtype)
    got = matmul(x, prepare_matrix(weight, dtype))
    assert got.dtype == dtype and got.shape == (11, 70)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=tolerance * 1100**0.5)


def test_no_rows_and_wrong_width() -> None:
    matrix = prepare_matrix(torch.ones(3, 8))
    assert matmul(torch.zeros(0, 8), matrix).shape == (0, 3)
    with pytest.raises(ValueError, match="x has 9 inputs a row, the matrix expects 8"):
        matmul(torch.zeros(2, 9), matrix)
