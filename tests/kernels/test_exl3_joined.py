"""EXL3 matrices that take the same rows, in one go; on a GPU the bits of one at a time."""

import pytest
import torch
from tests.kernels.exl3_data import random_matrix

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.exl3 import Codebook
from twinspark.kernels.exl3.cuda import CudaExl3, exl3_rows, prepare_exl3_cuda
from twinspark.kernels.exl3.cuda_plan import Device, RowsPlan, plan_rows, rows_defines
from twinspark.kernels.exl3.joined import (
    SOURCE,
    CudaExl3Joined,
    cuda_variants,
    exl3_joined,
    prepare_joined,
    why_not_joined,
)

OUTPUTS = [(1280, 512), (256, 128, 384), (128, 512, 256, 256)]  # of the matrices


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits", [2, 5, 7])
def test_it_compiles(bits: int, arch: str) -> None:
    plan = RowsPlan(row_tiles=1 + bits % 3, warps=4 + 4 * (bits % 2), fused=bits == 2, shared=0)
    cubin = compile_cubin(SOURCE, arch=arch, defines=rows_defines(bits, Codebook.MUL1, plan))
    names = (b"exl3_joined_rotate", b"exl3_joined_unit", b"exl3_joined_finish")
    assert all(name in cubin for name in names)


def test_variants_are_those_that_plans_ask_for() -> None:
    device = Device(processors=132, shared=232448, wgmma=True)
    found = list(cuda_variants(5120, 1792, 5, Codebook.MUL1, device))
    for rows in (1, 6, 24):
        plan = plan_rows(rows, 5120, 1792, 5, device)
        assert (SOURCE, rows_defines(5, Codebook.MUL1, plan)) in found
    assert {defines["ROW_TILES"] for _, defines in found} == set(range(1, 9))


def held(inputs: int = 256, outputs: int = 128, bits2: int = 8, bias: bool = False) -> CudaExl3:
    """A matrix as the CUDA body holds it, without a device."""
    matrix = random_matrix(inputs, outputs, bits2=bits2, bias=bias)
    return CudaExl3(matrix.trellis, matrix.suh, matrix.svh, matrix.bias, Codebook.MUL1)


def test_matrices_must_take_the_same_rows_and_be_of_one_width() -> None:
    own = [held(), held(outputs=384), held(outputs=256)]
    assert why_not_joined(own) is None
    assert CudaExl3Joined(tuple(own)).ends == (1, 4, 6, 6)
    for other in (held(inputs=384), held(bits2=6)):
        assert "2 kinds" in (why_not_joined([*own, other]) or "")
        assert prepare_joined([*own, other]) is None
    assert "bias" in (why_not_joined([held(), held(bias=True)]) or "")
    assert "two to 4" in (why_not_joined([held()]) or "")
    assert "two to 4" in (why_not_joined([held()] * 5) or "")


def matrices(inputs: int, outputs: tuple[int, ...], bits: int = 5) -> list[CudaExl3]:
    device = torch.device("cuda", 0)
    # seeds a multiple of three apart have one codebook
    made = [random_matrix(inputs, n, bits2=2 * bits, seed=3 * i) for i, n in enumerate(outputs)]
    return [prepare_exl3_cuda(matrix.to(device)) for matrix in made]


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
def test_rows_have_the_bits_of_one_matrix_at_a_time(outputs: tuple[int, ...]) -> None:
    own = matrices(1152, outputs, bits=3 if len(outputs) == 3 else 5)
    joined = CudaExl3Joined(tuple(own))
    dtypes = [(torch.bfloat16, torch.float32, torch.float16)[n % 3] for n in range(len(own))]
    for rows in (*range(1, 25), 33, 64, 65, 0):
        x = torch.randn(rows, 1152, device="cuda").bfloat16()
        found = exl3_joined(x, joined, dtypes)
        for y, matrix, dtype in zip(found, own, dtypes, strict=True):
            assert y.shape == (rows, matrix.out_features) and y.dtype == dtype
            assert torch.equal(y, exl3_rows(x, matrix, out_dtype=dtype)), rows


@pytest.mark.gpu
def test_the_release_s_shape_and_rows_that_are_apart() -> None:
    own = matrices(5120, (1280, 512, 512, 512))
    joined = CudaExl3Joined(tuple(own))
    for rows in (1, 6, 24):
        x = torch.randn(rows, 5632, device="cuda").bfloat16()[:, 512:]
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        for y, matrix in zip(exl3_joined(x, joined, dtypes), own, strict=True):
            assert torch.equal(y, exl3_rows(x, matrix, out_dtype=y.dtype))


@pytest.mark.gpu
def test_captured_equals_eager() -> None:
    joined = CudaExl3Joined(tuple(matrices(512, (256, 128))))
    for rows in (6, 24):
        x = torch.randn(rows, 512, device="cuda").bfloat16()
        wanted = [y.clone() for y in exl3_joined(x, joined, [torch.bfloat16] * 2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = exl3_joined(x, joined, [torch.bfloat16] * 2)
        for y in found:
            y.zero_()
        graph.replay()
        assert all(torch.equal(y, w) for y, w in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_wrong_rows_are_told() -> None:
    joined = CudaExl3Joined(tuple(matrices(256, (128, 128))))
    bf16 = torch.zeros(3, 256, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="rows of 256 values"):
        exl3_joined(bf16[:, :128], joined, [torch.bfloat16] * 2)
    with pytest.raises(ValueError, match="as many results"):
        exl3_joined(bf16, joined, [torch.bfloat16])
    with pytest.raises(ValueError, match="16 bytes"):
        exl3_joined(
            torch.zeros(3, 257, device="cuda").bfloat16()[:, 1:], joined, [torch.bfloat16] * 2
        )
    with pytest.raises(ValueError, match="move x there"):
        exl3_joined(bf16.cpu(), joined, [torch.bfloat16] * 2)
