"""CUDA body of the EXL3 product: every variant compiles; on a GPU float64, bits and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.kernels.exl3_data import random_matrix

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.exl3 import (
    Codebook,
    Exl3Matrix,
    PreparedExl3,
    cuda,
    exl3_linear,
    prepare_exl3,
)
from twinspark.kernels.exl3.choose import exl3_product, prepare_product
from twinspark.kernels.exl3.cuda import (
    ROWS_SOURCE,
    SLAB_SOURCE,
    TILES_SOURCE,
    UNPACK_SOURCE,
    CudaExl3,
    exl3_rows,
    prepare_exl3_cuda,
)
from twinspark.kernels.exl3.cuda_plan import (
    MOST_ROWS,
    Device,
    RowsPlan,
    SlabPlan,
    plan_rows,
    plan_slab,
    plan_tiles,
    prefer_tiles,
    rows_defines,
    slab_variants,
    tiles_defines,
    unpack_defines,
)

H200 = Device(processors=132, shared=232448, wgmma=True)
GB10 = Device(processors=48, shared=101376, wgmma=False)
DEVICES = {"sm_90a": H200, "sm_121": GB10}
SHAPES_OF_PLANS = [(128, 128), (4096, 1024), (1280, 16384), (5120, 64640), (15360, 5120)]
FEWEST_SLAB_ROWS = dict(zip(SHAPES_OF_PLANS, (1024, 256, 512, 768, 512), strict=True))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_compile(bits: int, arch: str) -> None:
    # over the widths every row tile, block size, codebook and rotation comes up
    plan = RowsPlan(
        row_tiles=(1, 2, 3, 8)[bits % 4], warps=4 + 4 * (bits // 2 % 2), fused=bits == 4, shared=0
    )
    defines = rows_defines(bits, list(Codebook)[bits % 3], plan)
    cubin = compile_cubin(ROWS_SOURCE, arch=arch, defines=defines)
    assert cubin[:4] == b"\x7fELF"
    assert all(name in cubin for name in (b"exl3_rotate", b"exl3_unit", b"exl3_finish"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits", [3, 7])  # widths differ in common.cuh, which rows.cu covers
def test_tiles_compile(bits: int, arch: str) -> None:
    defines = tiles_defines(bits, Codebook.MUL1, plan_tiles(bits, DEVICES[arch]))
    cubin = compile_cubin(TILES_SOURCE, arch=arch, defines=defines)
    assert all(name in cubin for name in (b"exl3_rotate_tiled", b"exl3_tiles"))


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_slabs_compile(arch: str, device: Device) -> None:
    if device.wgmma and arch != "sm_90a":
        pytest.skip("instructions of compute capability 9.0")
    for defines in slab_variants(device).values():
        cubin = compile_cubin(SLAB_SOURCE, arch=arch, defines=defines)
        assert all(name in cubin for name in (b"exl3_rotate_wide", b"exl3_slab"))


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("bits", [1, 5, 8])
def test_unpacking_compiles(bits: int, codebook: Codebook) -> None:
    defines = unpack_defines(bits, codebook)
    assert b"exl3_unpack" in compile_cubin(UNPACK_SOURCE, arch="sm_90a", defines=defines)


def test_slabs_are_bounded() -> None:
    for inputs, outputs in SHAPES_OF_PLANS:
        fewest = FEWEST_SLAB_ROWS[inputs, outputs]
        assert plan_slab(fewest - 1, inputs, outputs, H200) is None
        for rows in (fewest, 1024, 2048, 4096, 10000):
            plan = plan_slab(rows, inputs, outputs, H200)
            assert plan is not None
            assert plan.columns * inputs * 2 <= 64 << 20 and plan.shared + 2048 <= H200.shared
            assert plan.columns % 128 == 0
            stages = slab_variants(H200)[plan.rows]["STAGES"]
            assert stages * 64 * (plan.rows + 128) * 2 <= plan.shared and stages >= 2


def test_slabs_without_wgmma_are_bounded() -> None:
    for inputs, outputs in SHAPES_OF_PLANS:
        fewest = 1024 if (inputs, outputs) == (128, 128) else 512
        assert plan_slab(fewest - 1, inputs, outputs, GB10) is None
        for rows in (fewest, 1100, 4096):
            plan = plan_slab(rows, inputs, outputs, GB10)
            assert plan is not None and plan.columns % 128 == 0
            assert plan.columns * inputs * 2 <= 20 << 20
            stages = slab_variants(GB10)[plan.rows]["STAGES"]
            assert stages * 64 * (plan.rows + 128) * 2 <= plan.shared and stages >= 3
            assert plan.shared + 2048 <= GB10.shared


def test_rows_of_blocks_without_wgmma_leave_no_multiprocessor_idle() -> None:
    like_h200 = replace(H200, shared=GB10.shared, wgmma=False)
    shapes = {  # rows, inputs, outputs: rows of a block, columns of a slab
        (512, 5120, 1792): (64, 1792),
        (4096, 5120, 1792): (128, 1792),
        (512, 5120, 1152): (64, 1152),
        (512, 4096, 5120): (128, 2560),
        (1024, 4096, 5120): (128, 2048),  # 128 blocks at a time, not 160
        (2048, 4096, 5120): (128, 2048),
    }
    for shape, wanted in shapes.items():
        plan = plan_slab(*shape, like_h200)
        assert plan is not None and (plan.rows, plan.columns) == wanted, shape


def test_compiled_code_is_kept_and_found_again(tmp_path: Path) -> None:
    source = tmp_path / "one.cu"
    source.write_text('extern "C" __global__ void one(int* p) { *p = VALUE; }\n')
    kept = tmp_path / "cache"
    first = compile_cubin(source, arch="sm_90a", defines={"VALUE": 1}, cache_dir=kept)
    (file,) = kept.iterdir()
    file.write_bytes(b"from the cache")
    again = compile_cubin(source, arch="sm_90a", defines={"VALUE": 1}, cache_dir=kept)
    assert again == b"from the cache"
    other = compile_cubin(source, arch="sm_90a", defines={"VALUE": 2}, cache_dir=kept)
    arch = compile_cubin(source, arch="sm_121", defines={"VALUE": 1}, cache_dir=kept)
    source.write_text('extern "C" __global__ void one(int* p) { *p = VALUE + 4; }\n')
    text = compile_cubin(source, arch="sm_90a", defines={"VALUE": 1}, cache_dir=kept)
    assert len({first, other, arch, text}) == 4 and len(list(kept.iterdir())) == 4
    blocked = tmp_path / "one.cu" / "cache"  # a folder that cannot be made is no error
    assert compile_cubin(source, arch="sm_90a", defines={"VALUE": 1}, cache_dir=blocked) == text


def test_bad_source_and_architecture_are_told(tmp_path: Path) -> None:
    source = tmp_path / "bad.cu"
    source.write_text('extern "C" __global__ void bad() { undeclared(); }\n')
    with pytest.raises(KernelUnsupported, match=r"(?s)bad\.cu does not compile.*undeclared"):
        compile_cubin(source, arch="sm_90a", defines={})
    with pytest.raises(KernelUnsupported, match="sm_7"):
        compile_cubin(source, arch="sm_7", defines={})


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize("bits", range(1, 9))
def test_plans_fit_the_device(bits: int, device: Device) -> None:
    for inputs, outputs in SHAPES_OF_PLANS:
        for rows in range(1, MOST_ROWS + 1):
            plan = plan_rows(rows, inputs, outputs, bits, device)
            assert 8 * plan.row_tiles >= rows > 8 * (plan.row_tiles - 1)
            assert plan.shared + 128 <= device.shared
            assert not plan.fused or plan.row_tiles == 1
    tiles = plan_tiles(bits, device)
    assert tiles.stages >= 2 and tiles.resident * (tiles.shared + 1024) <= device.shared + 1024


def test_tiles_are_for_many_rows() -> None:
    for inputs, outputs in SHAPES_OF_PLANS:
        tiles = plan_tiles(3, H200)
        assert not prefer_tiles(24, inputs, outputs, tiles, H200)
    assert prefer_tiles(128, 1280, 16384, tiles, H200)
    assert not prefer_tiles(128, 5120, 2304, tiles, H200)
    assert all(prefer_tiles(2048, *shape, tiles, H200) for shape in SHAPES_OF_PLANS[1:])


def test_choice_without_a_gpu() -> None:
    matrix = random_matrix(128, 128)
    prepared = prepare_product(matrix)
    assert isinstance(prepared, PreparedExl3)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(exl3_product(x, prepared), exl3_linear(x, prepared))
    with pytest.raises(KernelUnsupported, match="backend 'cuda' does not fit .* on cpu"):
        prepare_product(matrix, backend="cuda")


def test_refusals_without_a_gpu() -> None:
    with pytest.raises(KernelUnsupported, match="needs a CUDA device, the tensors are on cpu"):
        prepare_exl3_cuda(random_matrix(128, 128))
    with pytest.raises(KernelUnsupported, match=r"whole bits a weight, the matrix has 2\.5"):
        prepare_exl3_cuda(random_matrix(128, 128, bits2=5))


# ---- on a GPU


def on_gpu(matrix: Exl3Matrix) -> Exl3Matrix:
    bias = None if matrix.bias is None else matrix.bias.cuda()
    return Exl3Matrix(
        matrix.trellis.cuda(), matrix.suh.cuda(), matrix.svh.cuda(), matrix.codebook, bias
    )


def prepared_on_gpu(matrix: Exl3Matrix) -> CudaExl3:
    return prepare_exl3_cuda(on_gpu(matrix))


def rows_of(count: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).cuda()


def poisoned(rows: int, outputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, outputs), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width_and_codebook_against_float64(bits: int, codebook: Codebook) -> None:
    seed = list(Codebook).index(codebook)
    matrix = random_matrix(1152, 384, bits2=2 * bits, seed=seed, bias=True)
    assert matrix.codebook is codebook
    prepared, reference = prepared_on_gpu(matrix), prepare_exl3(matrix)
    for count in (1, 5, 9, 24, 70, 200):
        x = rows_of(count, 1152, seed=bits)
        exact = exl3_linear(x.cpu().double(), reference)
        y = exl3_rows(x, prepared, out=poisoned(count, 384)).cpu()
        # one fp16 rounding of the rotated input: 2^-11 / sqrt(3) relative rms at most
        assert (y.double() - exact).norm() < 4e-4 * exact.norm(), count


SHAPES = [(128, 128), (384, 128), (512, 256), (640, 1408), (1152, 5120), (5120, 2304), (4096, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_depend_on_the_call_on_gpu(shape: tuple[int, int]) -> None:
    prepared = prepared_on_gpu(random_matrix(*shape, bits2=6, seed=2, bias=True))
    x = rows_of(64, shape[0], seed=1).bfloat16()
    alone = torch.cat(
        [exl3_rows(x[i : i + 1], prepared, out_dtype=torch.float32) for i in range(64)]
    )
    for count in range(1, 65):
        first = 64 - count
        together = exl3_rows(
            x[first:], prepared, out=poisoned(count, shape[1]), out_dtype=torch.float32
        )
        assert torch.equal(together, alone[first:]), count
    exact = exl3_linear(
        x.cpu().double(), prepare_exl3(random_matrix(*shape, bits2=6, seed=2, bias=True))
    )
    assert (alone.cpu().double() - exact).norm() < 4e-4 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", range(1, 9))
def test_prompt_rows_have_the_bits_of_decode(bits: int) -> None:
    # 1408 rows by 3200 outputs and more reach tiles.cu; 640 inputs end in a short chunk
    for inputs, outputs, count in ((640, 3200, 1401), (1152, 16384, 130), (128, 256, 4096)):
        prepared = prepared_on_gpu(
            random_matrix(inputs, outputs, bits2=2 * bits, seed=2, bias=True)
        )
        device = H200 if torch.cuda.get_device_capability() == (9, 0) else GB10
        plan = plan_tiles(bits, device)
        assert prefer_tiles(count, inputs, outputs, plan, device), (inputs, outputs)
        x = rows_of(count, inputs, seed=bits).bfloat16()
        many = exl3_rows(x, prepared, out=poisoned(count, outputs), out_dtype=torch.float32)
        for first in (0, 5, 100, count - 24):
            few = exl3_rows(x[first : first + 24], prepared, out_dtype=torch.float32)
            assert torch.equal(many[first : first + 24], few), (inputs, outputs, first)
        one = exl3_rows(x[-1:], prepared, out_dtype=torch.float32)
        assert torch.equal(many[-1:], one)
        assert many.isfinite().all()


def with_rows(plan: SlabPlan | None, rows: int, device: Device) -> SlabPlan | None:
    """The plan with blocks of so many rows, where it is one."""
    if plan is None:
        return None
    stages = slab_variants(device)[rows]["STAGES"]
    shared = max(stages * 64 * (rows + 128) * 2, rows * 4 * 132)
    return replace(plan, rows=rows, shared=shared)


def forget_plans(request: pytest.FixtureRequest) -> None:
    """Plans are kept by the device's number: none now, and none that is made from now on."""
    for kept in (cuda.rows_plan, cuda.whole_plan_of):
        kept.cache_clear()
        request.addfinalizer(kept.cache_clear)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("device", "block_rows"),
    [(H200, 128), (H200, 160), (H200, 192), (GB10, 64), (GB10, 128)],
    ids=lambda value: str(value) if isinstance(value, int) else f"wgmma{int(value.wgmma)}",
)
def test_rows_through_slabs_have_the_bits_of_decode(
    device: Device,
    block_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if device.wgmma and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("instructions of compute capability 9.0")
    forget_plans(request)
    monkeypatch.setattr(cuda, "device_of", lambda index: device)

    def plan(index: int, *shape: int) -> SlabPlan | None:
        return with_rows(plan_slab(*shape, device), block_rows, device)

    monkeypatch.setattr(cuda, "slab_plan", plan)
    shapes = [(640, 384, 1024), (1152, 1280, 1537), (5120, 2304, 2048), (1280, 16384, 1100)]
    for inputs, outputs, count in shapes:  # without wgmma the last two go in two slabs each
        made = plan(0, count, inputs, outputs)
        assert made is not None and made.rows == block_rows
        assert device.wgmma or (made.columns < outputs) == (outputs > 2000)
        prepared = prepared_on_gpu(random_matrix(inputs, outputs, bits2=6, seed=2, bias=True))
        x = rows_of(count, inputs, seed=3).bfloat16()
        x[7], x[count - 3] = float("nan"), 1e30
        many = exl3_rows(x, prepared, out=poisoned(count, outputs), out_dtype=torch.float32)
        fewer = [exl3_rows(part, prepared, out_dtype=torch.float32) for part in x.split(24)]
        again = exl3_rows(x.float(), prepared, out_dtype=torch.bfloat16)
        assert all(y[7].isnan().all() for y in (many, again))
        kept = [i for i in range(count) if i != 7]
        alone = torch.cat(fewer)
        assert torch.equal(many[kept].view(torch.int32), alone[kept].view(torch.int32))
        assert torch.equal(again[kept], many[kept].bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [3, 65, 200, 700, 1300])  # by rows, tiles and slabs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_results_may_be_apart(count: int, dtype: torch.dtype) -> None:
    prepared = prepared_on_gpu(random_matrix(640, 384, bits2=10, seed=2, bias=True))
    x, room = rows_of(count, 640).bfloat16(), poisoned(count, 3 * 384).to(dtype)
    room[:] = 7.0
    part = room[:, 384:768]
    assert exl3_rows(x, prepared, out_dtype=dtype, out=part) is part
    assert torch.equal(part, exl3_rows(x, prepared, out_dtype=dtype))
    assert bool((room[:, :384] == 7.0).all()) and bool((room[:, 768:] == 7.0).all())


@pytest.mark.gpu
def test_several_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_on_gpu(random_matrix(640, 1280, bits2=10, seed=2, bias=True))
    x = rows_of(1100, 640).bfloat16()
    one = exl3_rows(x, prepared)

    def small(index: int, rows: int, inputs: int, outputs: int) -> SlabPlan | None:
        return plan_slab(rows, inputs, outputs, cuda.device_of(index), most_bytes=600 * 1024)

    monkeypatch.setattr(cuda, "slab_plan", small)
    plan = small(0, 1100, 640, 1280)
    assert plan is None or plan.columns == 384
    assert torch.equal(exl3_rows(x, prepared), one)


@pytest.mark.gpu
def test_captured_equals_eager() -> None:
    prepared = prepared_on_gpu(random_matrix(2304, 5120, bits2=6, seed=2))
    for count in (1, 8, 24, 40, 300, 1100):
        x = rows_of(count, 2304).bfloat16()
        eager = exl3_rows(x, prepared)
        out = torch.zeros_like(eager)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                exl3_rows(x, prepared, out=out)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, eager)


@pytest.mark.gpu
def test_dtypes_and_layouts() -> None:
    matrix = random_matrix(640, 256, seed=2, bias=True)
    prepared = prepared_on_gpu(matrix)
    x = rows_of(7, 640).bfloat16()
    want = exl3_rows(x, prepared, out_dtype=torch.float32)
    assert torch.equal(exl3_rows(x.float(), prepared), want)
    assert torch.equal(exl3_rows(x, prepared), want.bfloat16())
    assert torch.equal(exl3_rows(x.float(), prepared, out_dtype=torch.float16), want.half())
    half = rows_of(7, 640, seed=3).half()
    assert torch.equal(
        exl3_rows(half, prepared, out_dtype=torch.float32), exl3_rows(half.float(), prepared)
    )
    wide = torch.zeros(7, 1280, dtype=torch.bfloat16, device="cuda")
    for view in (wide[:, :640], wide[:, 1:641], wide[:, ::2], wide.view(14, 640)[::2]):
        view.copy_(x)
        assert torch.equal(exl3_rows(view, prepared, out_dtype=torch.float32), want)
    turned = x.T.contiguous().T
    assert torch.equal(exl3_rows(turned, prepared, out_dtype=torch.float32), want)


@pytest.mark.gpu
def test_neighbours_with_nan_or_inf_change_nothing_on_gpu() -> None:
    prepared = prepared_on_gpu(random_matrix(640, 256, seed=2))
    for count in (8, 24):
        x = rows_of(count, 640)
        clean = exl3_rows(x, prepared)
        x[2], x[5] = float("nan"), 1e30
        dirty = exl3_rows(x, prepared)
        kept = [i for i in range(count) if i not in (2, 5)]
        assert torch.equal(clean[kept], dirty[kept])
        assert dirty[2].isnan().all() and dirty[5].isfinite().all()


@pytest.mark.gpu
def test_no_rows_and_wrong_calls_on_gpu() -> None:
    prepared = prepared_on_gpu(random_matrix(256, 128, seed=2))
    assert exl3_rows(rows_of(0, 256), prepared).shape == (0, 128)
    with pytest.raises(ValueError, match="rows of 256"):
        exl3_rows(rows_of(1, 128), prepared)
    with pytest.raises(ValueError, match="x must be bfloat16"):
        exl3_rows(rows_of(1, 256).double(), prepared)
    with pytest.raises(ValueError, match="the result must be"):
        exl3_rows(rows_of(1, 256), prepared, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="x is on cpu"):
        exl3_rows(rows_of(1, 256).cpu(), prepared)
    with pytest.raises(ValueError, match="out must be torch.float32"):
        exl3_rows(rows_of(1, 256), prepared, out=poisoned(2, 128))
    with pytest.raises(ValueError, match="contiguous rows at multiples of 16 bytes"):
        exl3_rows(rows_of(2, 256), prepared, out=poisoned(2, 130)[:, :128])
    y = exl3_rows(rows_of(1, 256), prepared)
    assert y.isfinite().all()
