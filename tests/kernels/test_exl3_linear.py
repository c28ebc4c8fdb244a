"""EXL3 linear: golden products, row invariance bit for bit (I15), grouped = alone."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.kernels.exl3_data import GOLDEN, golden_matrix, random_matrix

from twinspark.kernels.exl3 import (
    Exl3Matrix,
    dense_weight,
    exl3_grouped,
    exl3_linear,
    hadamard128,
    prepare_exl3,
    prepare_experts,
)

MATRIX_ID = lambda e: f"{e['codebook']}-{e['bits']}-{e['in_features']}x{e['out_features']}"  # noqa: E731


@pytest.mark.parametrize("entry", GOLDEN["matrices"], ids=MATRIX_ID)
def test_golden_product(entry: dict[str, dict[str, object]]) -> None:
    matrix, x = golden_matrix(entry)
    dense = dense_weight(matrix)
    golden = entry["W_float64"]
    for place, value in golden["entries"].items():  # type: ignore[attr-defined]
        i, j = map(int, place.split(","))
        assert dense[i, j].item() == pytest.approx(value, rel=1e-9, abs=1e-15)
    assert dense.abs().sum().item() == pytest.approx(golden["sum_abs"], rel=1e-9)
    assert dense.norm().item() == pytest.approx(golden["frobenius"], rel=1e-9)
    expected = entry["y_float64"]
    prepared = prepare_exl3(matrix)
    for y in (x @ dense, exl3_linear(x, prepared)):
        assert y.dtype == torch.float64
        assert y[0, :4].tolist() == pytest.approx(expected["row0_first_4"], rel=1e-9)
        assert y[1, -4:].tolist() == pytest.approx(expected["row1_last_4"], rel=1e-9)
        assert y.square().mean().sqrt().item() == pytest.approx(expected["rms"], rel=1e-9)
    # one fp16 rounding of the rotated input: relative rms of 2^-11 / sqrt(3) or less
    fast = exl3_linear(x.float(), prepared)
    assert (fast.double() - x @ dense).norm() <= 5e-4 * (x @ dense).norm()


# One chunk; one chunk exactly; a short last chunk; many chunks; one column block; wide.
SHAPES = [(128, 128), (512, 256), (640, 128), (6144, 128), (256, 1408), (1280, 640), (384, 8064)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_depend_on_the_call(shape: tuple[int, int]) -> None:
    prepared = prepare_exl3(random_matrix(*shape, bits2=7, bias=True))
    x = torch.randn(128, shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    together = exl3_linear(x, prepared, out_dtype=torch.float32)
    for first, count in [(0, 1), (7, 1), (127, 1), (3, 2), (5, 7), (1, 8), (2, 9), (60, 17)]:
        alone = exl3_linear(x[first : first + count], prepared, out_dtype=torch.float32)
        assert torch.equal(alone, together[first : first + count]), (first, count)
    mixed = x[[9, 9, 100, 3, 77]] * torch.tensor([[1], [1], [1000], [1], [1]])
    row = exl3_linear(mixed.bfloat16(), prepared, out_dtype=torch.float32)
    assert torch.equal(row[3], together[3]) and torch.equal(row[0], row[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thread_count_does_not_change_bits(shape: tuple[int, int]) -> None:
    prepared = prepare_exl3(random_matrix(*shape))
    x = torch.randn(11, shape[0], generator=torch.Generator().manual_seed(2))
    experts = prepare_experts([random_matrix(*shape)] * 3) if shape[1] < 4096 else None
    ids = torch.tensor([0] * 2 + [1] * 8 + [2])
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(exl3_linear(x, prepared))
            results.append(exl3_grouped(x, ids, experts)[0] if experts else results[-1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


def test_head_sized_columns() -> None:
    # 129280 / 2 outputs: an odd number of 128-blocks, wide enough for any library's blocking
    prepared = prepare_exl3(random_matrix(128, 64640, bits2=2))
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(3))
    together = exl3_linear(x, prepared)
    assert torch.equal(exl3_linear(x[8:], prepared)[0], together[8])
    assert torch.equal(exl3_linear(x[2:5], prepared), together[2:5])


def test_neighbours_with_nan_or_inf_change_nothing() -> None:
    prepared = prepare_exl3(random_matrix(640, 256))
    x = torch.randn(8, 640, generator=torch.Generator().manual_seed(4))
    clean = exl3_linear(x, prepared)
    x[2], x[5] = float("nan"), float("inf")
    dirty = exl3_linear(x, prepared)
    for row in (0, 1, 3, 4, 6, 7):
        assert torch.equal(clean[row], dirty[row])


@pytest.mark.parametrize("bits2", range(2, 17))
def test_every_width_against_the_dense_product(bits2: int) -> None:
    matrix = random_matrix(384, 256, bits2=bits2, seed=bits2, bias=True)
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(bits2)).double()
    assert matrix.bias is not None
    exact = x @ dense_weight(matrix) + matrix.bias.double()
    prepared = prepare_exl3(matrix)
    torch.testing.assert_close(exl3_linear(x, prepared), exact, rtol=1e-11, atol=1e-11)
    # fp16 rounding of the rotated input gives 2^-11 / sqrt(3) = 2.8e-4 relative rms at most
    assert (exl3_linear(x.float(), prepared).double() - exact).norm() < 4e-4 * exact.norm()
    # bf16 activations and output: 2^-9 / sqrt(3) each
    low = exl3_linear(x.bfloat16(), prepared)
    assert low.dtype == torch.bfloat16
    assert (low.double() - exact).norm() < 3e-3 * exact.norm()


def test_chunk_sums_ascend() -> None:
    # The canonical order is observable: one product over all inputs has other bits.
    matrix = random_matrix(2048, 128)
    prepared = prepare_exl3(matrix)
    x = torch.randn(8, 2048, generator=torch.Generator().manual_seed(5))
    scaled = hadamard128(x * prepared.suh_K).half().float()
    parts = [scaled[:, c : c + 512].contiguous() for c in range(0, 2048, 512)]
    weights = [prepared.weight_KN[c : c + 512] for c in range(0, 2048, 512)]
    total = torch.mm(parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total = total + torch.mm(part, weight)
    expected = hadamard128(total) * prepared.svh_N
    assert torch.equal(exl3_linear(x, prepared), expected)
    whole = hadamard128(torch.mm(scaled, prepared.weight_KN)) * prepared.svh_N
    assert not torch.equal(whole, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(256, 128), (1152, 384)], ids=str)
def test_grouped_equals_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = [random_matrix(*shape, bits2=4 + e, seed=e) for e in range(5)]
    alone, experts = [prepare_exl3(m) for m in matrices], prepare_experts(matrices)
    for ids in ([2], [0, 4], [0] * 9 + [1, 1, 3] + [4] * 17, [1] * 8 + [2] * 8, [3] * 4 + [4] * 8):
        x = torch.randn(len(ids), shape[0], generator=torch.Generator().manual_seed(6)).to(dtype)
        (out,) = exl3_grouped(x, torch.tensor(ids), experts, out_dtype=torch.float64)
        for p, expert in enumerate(ids):
            row = exl3_linear(x[p : p + 1], alone[expert], out_dtype=torch.float64)
            assert torch.equal(out[p], row[0]), (ids, p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sets_of_experts_equal_alone(dtype: torch.dtype) -> None:
    """Sets 0, 1 and 3 scale their input alike and share its rotation, set 2 does not."""
    matrices = [random_matrix(256, 128, bits2=6, seed=e) for e in range(12)]
    for one in range(12):
        if one // 3 in (1, 3):
            matrices[one] = replace(matrices[one], suh=matrices[one % 3].suh)
    alone, experts = [prepare_exl3(m) for m in matrices], prepare_experts(matrices, 4)
    assert experts.sources == (0, 0, 2, 0)
    for ids in ([1], [0] * 9 + [1] + [2] * 8, [0] * 3 + [2] * 20):
        generator = torch.Generator().manual_seed(6)
        own = torch.randn(4, len(ids), 256, generator=generator).to(dtype)
        for x in (own, own[0]):
            found = exl3_grouped(x, torch.tensor(ids), experts, out_dtype=torch.float64)
            for number, p in product(range(4), range(len(ids))):
                row = x[number, p : p + 1] if x.dim() == 3 else x[p : p + 1]
                wanted = exl3_linear(row, alone[number * 3 + ids[p]], out_dtype=torch.float64)
                assert torch.equal(found[number, p], wanted[0]), (ids, number, p)


def test_empty_calls() -> None:
    matrix = random_matrix(128, 256)
    prepared, experts = prepare_exl3(matrix), prepare_experts([matrix])
    for dtype in (torch.bfloat16, torch.float64):
        assert exl3_linear(torch.empty(0, 128, dtype=dtype), prepared).shape == (0, 256)
        none = torch.empty(0, dtype=torch.int64)
        assert exl3_grouped(torch.empty(0, 128, dtype=dtype), none, experts).shape == (1, 0, 256)


def test_rotation_is_its_own_inverse_and_row_invariant() -> None:
    x = torch.randn(19, 640, generator=torch.Generator().manual_seed(7))
    once = hadamard128(x)
    torch.testing.assert_close(hadamard128(once), x, rtol=1e-5, atol=1e-5)
    assert torch.equal(hadamard128(x[13]), once[13])
    one = torch.zeros(128, dtype=torch.float64)
    one[5] = 1
    signs = [1 - 2 * (bin(5 & j).count("1") % 2) for j in range(128)]
    assert hadamard128(one).tolist() == [s / 128**0.5 for s in signs]
    with pytest.raises(ValueError, match="multiple of 128"):
        hadamard128(torch.zeros(2, 100))


def test_wrong_calls_are_refused() -> None:
    matrix = random_matrix(128, 256)
    with pytest.raises(ValueError, match="rows of 128"):
        exl3_linear(torch.zeros(2, 256), prepare_exl3(matrix))
    with pytest.raises(ValueError, match=r"suh must have shape \(128,\)"):
        Exl3Matrix(matrix.trellis, matrix.suh[:64], matrix.svh, matrix.codebook)
    with pytest.raises(ValueError, match="multiple of 128"):
        Exl3Matrix(matrix.trellis[:4], matrix.suh[:64], matrix.svh, matrix.codebook)
    experts = prepare_experts([matrix, matrix])
    with pytest.raises(ValueError, match="ascending"):
        exl3_grouped(torch.zeros(2, 128), torch.tensor([1, 0]), experts)
    with pytest.raises(ValueError, match="rows of 128 values for 1 sets"):
        exl3_grouped(torch.zeros(2, 2, 128), torch.tensor([0, 1]), experts)
    with pytest.raises(ValueError, match="common shape"):
        prepare_experts([matrix, random_matrix(256, 128)])
