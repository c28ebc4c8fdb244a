"""Several EXL3 matrices in one go: compiles everywhere; on a GPU the bits of one at a time."""

import pytest
import torch
from tests.kernels.exl3_data import random_matrix

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.exl3 import Codebook, cuda
from twinspark.kernels.exl3 import many as body
from twinspark.kernels.exl3.cuda import (
    ROWS_SOURCE,
    TILES_SOURCE,
    CudaExl3,
    exl3_rows,
    prepare_exl3_cuda,
)
from twinspark.kernels.exl3.cuda_plan import (
    Device,
    RowsPlan,
    plan_rows,
    rows_defines,
    slab_variants,
)
from twinspark.kernels.exl3.many import cuda_variants, exl3_many, prepare_many, why_not_many

GB10 = Device(processors=48, shared=101376, wgmma=False)
SHAPES = [(2, 256, 128), (8, 1024, 256), (3, 640, 256)]  # matrices, inputs, outputs


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits", [2, 5, 7])
def test_it_compiles(bits: int, arch: str) -> None:
    plan = RowsPlan(row_tiles=1 + bits % 3, warps=4 + 4 * (bits % 2), fused=bits == 2, shared=0)
    defines = {**rows_defines(bits, Codebook.MUL1, plan), "MANY": 1}
    cubin = compile_cubin(ROWS_SOURCE, arch=arch, defines=defines)
    assert all(name in cubin for name in (b"exl3_rotate", b"exl3_unit", b"exl3_finish"))


def test_variants_are_those_that_plans_ask_for() -> None:
    device = Device(processors=132, shared=232448, wgmma=True)
    alone = list(cuda_variants(4096, 1024, 5, Codebook.MUL1, device))
    assert [source for source, _ in alone].count(TILES_SOURCE) == 1
    assert all("MANY" not in defines for _, defines in alone)
    together = list(cuda_variants(4096, 1024, 5, Codebook.MUL1, device, count=8))
    assert all(source == ROWS_SOURCE and defines["MANY"] == 1 for source, defines in together)
    plan = plan_rows(6, 4096, 8 * 1024, 5, device)
    wanted = {**rows_defines(5, Codebook.MUL1, plan), "MANY": 1}
    assert (ROWS_SOURCE, wanted) in together
    assert {defines["ROW_TILES"] for _, defines in together} == set(range(1, 9))


def test_steps_that_no_int_holds_are_not_near() -> None:
    rows = torch.empty(0, dtype=torch.bfloat16, device="meta")
    assert body.are_near(rows.as_strided((2, 3, 128), (2**30 - 8, 128, 1)))
    assert not body.are_near(rows.as_strided((2, 3, 128), (2**30, 128, 1)))


def test_slabs_of_all_matrices_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(processors=132, shared=232448, wgmma=True)
    monkeypatch.setattr(body, "device_of", lambda index: device)
    plans = {rows: body._slab_plan(-1, 4, rows, 4096, 1024) for rows in (64, 255, 256, 2048, 2049)}
    assert [rows for rows, plan in plans.items() if plan is None] == [64, 255, 2049]
    for count, inputs, outputs in SHAPES:  # what tests on a GPU reach
        small = [body._slab_plan(-1, count, rows, inputs, outputs) for rows in (700, 1100, 2100)]
        assert [plan is None for plan in small] == [True, False, True]
    for rows, plan in plans.items():
        if plan is not None:
            assert plan.columns == 1024 and plan.matrices == 4  # a slab a matrix
            stages = slab_variants(device)[plan.rows]["STAGES"]
            assert plan.shared >= stages * (plan.rows + 128) * 128, rows


def test_slabs_without_wgmma_hold_some_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "device_of", lambda index: GB10)
    assert body._slab_plan(-2, 4, 511, 4096, 1024) is None
    for count, together in ((2, 2), (3, 2), (4, 2), (8, 2)):
        for rows in (512, 2049, 4096):
            plan = body._slab_plan(-2, count, rows, 4096, 1024)
            assert plan is not None
            assert (plan.columns, plan.matrices) == (1024, together)
    assert body._slab_plan(-2, 2, 4096, 5120, 1792) is None  # one after another
    small = body._slab_plan(-2, 3, 1100, 640, 256)
    assert small is not None and small.matrices == 3


def held(inputs: int = 256, outputs: int = 128, bits2: int = 8, bias: bool = False) -> CudaExl3:
    """A matrix as the CUDA body holds it, without a device."""
    matrix = random_matrix(inputs, outputs, bits2=bits2, bias=bias)
    return CudaExl3(matrix.trellis, matrix.suh, matrix.svh, matrix.bias, Codebook.MUL1)


def test_matrices_must_be_alike() -> None:
    assert why_not_many([held(), held()]) is None
    for other in (held(inputs=384), held(outputs=256), held(bits2=6)):
        reason = why_not_many([held(), other])
        assert reason is not None and "2 kinds" in reason
    reason = why_not_many([held(bias=True), held(bias=True)])
    assert reason is not None and "bias" in reason


def matrices(count: int, inputs: int, outputs: int) -> list[CudaExl3]:
    device = torch.device("cuda", 0)
    # seeds a multiple of three apart have one codebook
    made = [random_matrix(inputs, outputs, bits2=10, seed=3 * n) for n in range(count)]
    return [prepare_exl3_cuda(matrix.to(device)) for matrix in made]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_bits_of_one_matrix_at_a_time(shape: tuple[int, int, int]) -> None:
    count, inputs, outputs = shape
    own = matrices(*shape)
    many = prepare_many(own)
    for rows in (1, 2, 6, 8, 9, 24, 64, 65, 150, 300, 700, 1100, 2100):  # tiles and slabs, too
        x = torch.randn(rows, count, inputs, device="cuda").bfloat16().transpose(0, 1)
        wanted = torch.stack([exl3_rows(x[n], own[n]) for n in range(count)])
        for axes in ((0, 1), (1, 0)):  # matrices apart, and side by side
            sizes = (count, rows) if axes == (0, 1) else (rows, count)
            out = torch.full((*sizes, outputs), torch.nan, device="cuda").bfloat16()
            out = out if axes == (0, 1) else out.transpose(0, 1)
            assert torch.equal(exl3_many(x, many, out), wanted)


@pytest.mark.gpu
def test_slabs_of_some_matrices_have_the_bits_of_decode(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for kept in (cuda.rows_plan, cuda.whole_plan_of, body._slab_plan):
        kept.cache_clear()
        request.addfinalizer(kept.cache_clear)
    own, rows = matrices(3, 4096, 1024), 700
    many = prepare_many(own)
    for module in (cuda, body):
        monkeypatch.setattr(module, "device_of", lambda index: GB10)
    plan = body._slab_plan(0, 3, rows, 4096, 1024)
    assert plan is not None and plan.matrices == 2
    x = torch.randn(3, rows, 4096, device="cuda").bfloat16()
    found = exl3_many(x, many, torch.full((3, rows, 1024), torch.nan, device="cuda"))
    for number, matrix in enumerate(own):
        few = [exl3_rows(part, matrix, out_dtype=torch.float32) for part in x[number].split(24)]
        assert torch.equal(found[number], torch.cat(few))


@pytest.mark.gpu
def test_one_kind_of_rows_for_all_and_wide_results() -> None:
    own = matrices(3, 512, 256)
    many = prepare_many(own)
    x = torch.randn(5, 512, device="cuda").bfloat16()
    out = torch.empty(3, 5, 256, device="cuda")
    exl3_many(x.expand(3, 5, 512), many, out)
    for number, matrix in enumerate(own):
        assert torch.equal(out[number], exl3_rows(x, matrix, out_dtype=torch.float32))


@pytest.mark.gpu
def test_captured_equals_eager() -> None:
    own = matrices(4, 512, 256)
    many = prepare_many(own)
    x = torch.randn(4, 6, 512, device="cuda").bfloat16()
    out = torch.empty(4, 6, 256, device="cuda").bfloat16()
    wanted = exl3_many(x, many, out).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exl3_many(x, many, out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_wrong_shapes_are_told() -> None:
    many = prepare_many(matrices(2, 256, 128))
    x = torch.zeros(2, 3, 256, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="2 matrices 256 x 128"):
        exl3_many(x, many, torch.empty(2, 4, 128, device="cuda").bfloat16())
