"""Plain products and row-wise kernels on CUDA devices: layouts, plans, compiled code, every bit."""

import pytest
import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.plain import norm
from twinspark.kernels.plain.norm import embed_streams, rms_norm_rows, stream_mean
from twinspark.kernels.plain.product import (
    MOST_ROWS,
    ROWS_SOURCE,
    TILES_SOURCE,
    TYPES,
    RowsPlan,
    TilesPlan,
    lanes_of,
    plain_rows,
    plan_rows,
    plan_tiles,
    prefer_tiles,
    prepare_plain,
    rows_defines,
    tiles_defines,
    why_not_plain,
)

SHAPES = [(384, 5120), (32, 5120), (1, 5376), (129, 264), (512, 32), (1000, 96), (2304, 1152)]
DTYPES = list(TYPES)


def rows_of(num: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed))


# ---- without a GPU


@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_hold_every_weight_once(dtype: torch.dtype) -> None:
    weight = rows_of(20, 72).to(dtype)
    lanes = lanes_of(weight)
    values = 16 // weight.element_size()
    tiles = lanes.view(2, 3, 2, 8 // values, 8, 4, values)  # tile, group, half, run, g, q, value
    for output, k in [(0, 0), (19, 71), (8, 33), (17, 14), (7, 31)]:
        run, value = divmod(k % 8, values)
        where = (output // 16, k // 32, output % 16 // 8, run, output % 8, k % 32 // 8, value)
        assert tiles[where] == weight[output, k]
    assert lanes.count_nonzero() == weight.count_nonzero()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_compile(dtype: torch.dtype, arch: str) -> None:
    plans = [RowsPlan(1, 4, 1), RowsPlan(2, 10, 10), RowsPlan(8, 8, 8)]
    plan = plans[(TYPES[dtype] + ARCHITECTURES.index(arch)) % 3]
    cubin = compile_cubin(ROWS_SOURCE, arch=arch, defines=rows_defines(dtype, plan))
    assert b"plain_rows" in cubin
    out_warps = (4, 6)[ARCHITECTURES.index(arch)]
    defines = tiles_defines(dtype, TilesPlan(out_warps=out_warps, grid=(1, 1)))
    cubin = compile_cubin(TILES_SOURCE, arch=arch, defines=defines)
    assert b"plain_tiles" in cubin


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_row_kernels_compile(arch: str) -> None:
    cubin = compile_cubin(norm.SOURCE, arch=arch, defines={})
    assert all(name in cubin for name in (b"rms_norm_rows", b"stream_mean", b"embed_streams"))


def test_plans() -> None:
    for outputs, inputs in SHAPES:
        for rows in (1, 8, 9, 24, 33, MOST_ROWS):
            plan = plan_rows(rows, inputs, outputs, 132)
            assert 8 * plan.row_tiles >= rows and plan.warps % plan.split == 0
            assert plan.warps <= 10 and plan.split <= -(-inputs // 512)
    assert plan_rows(6, 5120, 384, 132).split == 10  # few outputs: the inputs are spread
    assert plan_rows(6, 5120, 64640, 132).split == 1
    assert plan_tiles(4096, 384, torch.float16, 132) == TilesPlan(out_warps=6, grid=(32, 4))
    assert plan_tiles(4096, 5120, torch.bfloat16, 132) == TilesPlan(out_warps=4, grid=(32, 40))
    assert not prefer_tiles(64, 5120) and not prefer_tiles(4096, 32) and prefer_tiles(4096, 384)


def test_why_not_and_refusals() -> None:
    cpu = torch.device("cpu")
    assert "bfloat16, float16 or float32" in str(why_not_plain(cpu, torch.float64, 128))
    assert "8 values at a time" in str(why_not_plain(cpu, torch.float32, 100))
    with pytest.raises(KernelUnsupported, match="needs a CUDA device"):
        prepare_plain(torch.zeros(16, 128))


def test_plain_bodies_of_row_kernels() -> None:
    x = rows_of(6, 4 * 24).view(6, 4, 24).bfloat16()
    mean = stream_mean(x)
    assert torch.equal(mean, (x.double().sum(1) / 4).bfloat16())
    wide = torch.zeros(6, 48, dtype=torch.bfloat16)
    assert stream_mean(x, out=wide[:, 24:]) is not None and torch.equal(wide[:, 24:], mean)
    table = rows_of(9, 24).bfloat16()
    out = embed_streams(table, torch.tensor([3, -1, 8]), 4)
    assert out.shape == (3, 4, 24) and not out[1].any()
    assert torch.equal(out[0, 2], table[3]) and torch.equal(out[2, 0], table[8])
    weight = 1 + rows_of(1, 24)[0] * 0.1
    normed = rms_norm_rows(x[:, 0].double(), weight, eps=0.0)
    assert normed.dtype == torch.float64
    torch.testing.assert_close((normed / weight).square().mean(1), torch.ones(6).double())


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64_and_rows_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    outputs, inputs = shape
    weight = (rows_of(outputs, inputs, 1) * 0.05).to(dtype).cuda()
    prepared = prepare_plain(weight)
    x = rows_of(700, inputs).bfloat16().cuda()
    whole = plain_rows(x, prepared, out=torch.full((700, outputs), float("nan"), device="cuda"))
    exact = x.double() @ weight.double().T
    # products are exact; a chunk's 32 steps and the chunks after it round in fp32
    assert (whole.double() - exact).norm() < 1e-6 * exact.norm()
    calls = [(0, 1), (699, 1), (3, 6), (9, 8), (100, 9), (200, 24), (300, 33), (636, 64)]
    for first, count in [*calls, (1, 65), (5, 128), (11, 300)]:
        out = torch.full((count, outputs), float("nan"), device="cuda")
        plain_rows(x[first : first + count], prepared, out=out)
        assert torch.equal(out, whole[first : first + count]), (first, count)
    narrow = plain_rows(x[:70], prepared, out_dtype=torch.bfloat16)
    assert torch.equal(narrow, whole[:70].bfloat16())


@pytest.mark.gpu
def test_weights_of_all_types_have_the_same_bits() -> None:
    # values that all three types hold: then planes past the first are zero
    weight = rows_of(64, 1024, 1).bfloat16().cuda()
    x = rows_of(30, 1024).bfloat16().cuda()
    got = [plain_rows(x, prepare_plain(weight.to(dtype))) for dtype in DTYPES]
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@pytest.mark.gpu
def test_neighbors_with_nan_change_nothing() -> None:
    prepared = prepare_plain(rows_of(40, 520, 1).cuda())
    for count in (8, 24, 200):
        x = rows_of(count, 520).bfloat16().cuda()
        clean = plain_rows(x, prepared)
        x[2], x[5] = float("nan"), float("inf")
        kept = [i for i in range(count) if i not in (2, 5)]
        assert torch.equal(plain_rows(x, prepared)[kept], clean[kept])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 24, 64, 300])
def test_captured_equals_eager(count: int) -> None:
    prepared = prepare_plain(rows_of(384, 5120, 1).half().cuda())
    x = rows_of(count, 5120).bfloat16().cuda()
    eager = plain_rows(x, prepared)
    out = torch.empty_like(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            plain_rows(x, prepared, out=out)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.gpu
def test_layouts_and_wrong_calls() -> None:
    prepared = prepare_plain(rows_of(40, 512, 1).cuda())
    x = rows_of(7, 512).bfloat16().cuda()
    want = plain_rows(x, prepared)
    wide = torch.zeros(7, 1024, dtype=torch.bfloat16, device="cuda")
    for view in (wide[:, :512], wide[:, 1:513], wide[:, ::2], wide.view(14, 512)[::2]):
        view.copy_(x)
        assert torch.equal(plain_rows(view, prepared), want)
    assert plain_rows(x[:0], prepared).shape == (0, 40)
    with pytest.raises(ValueError, match="rows of 512"):
        plain_rows(x[:, :256], prepared)
    with pytest.raises(ValueError, match="x must be bfloat16"):
        plain_rows(x.float(), prepared)
    with pytest.raises(ValueError, match="x is on cpu"):
        plain_rows(x.cpu(), prepared)
    with pytest.raises(ValueError, match="the result must be"):
        plain_rows(x, prepared, out_dtype=torch.float16)
    with pytest.raises(ValueError, match="out must be contiguous"):
        plain_rows(x, prepared, out=torch.empty(7, 41, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [128, 512, 1280, 5120, 9000])
def test_norm_against_float64(width: int, dtype: torch.dtype) -> None:
    x = (rows_of(300, width) * 3).to(dtype).cuda()
    weight = (1 + rows_of(1, width, 1)[0] * 0.1).cuda()
    got = rms_norm_rows(x, weight, eps=1e-20)
    e = x.double()
    want = e * e.square().mean(1, keepdim=True).rsqrt() * weight.double()
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert ((got.double() - want).abs() <= rounding * want.abs() + 1e-6).all()
    for first, count in ((0, 1), (7, 6), (100, 64)):
        part = rms_norm_rows(x[first : first + count], weight, eps=1e-20)
        assert torch.equal(part, got[first : first + count])
    apart = torch.zeros(300, 2 * width, dtype=dtype, device="cuda")
    apart[:, :width] = x
    assert torch.equal(rms_norm_rows(apart[:, :width], weight, eps=1e-20), got)


@pytest.mark.gpu
def test_mean_and_embedding_on_gpu() -> None:
    x = rows_of(9, 4 * 5120).view(9, 4, 5120).bfloat16().cuda()
    assert torch.equal(stream_mean(x).cpu(), stream_mean(x.cpu()))
    wide = torch.zeros(9, 3 * 5120, dtype=torch.bfloat16, device="cuda")
    stream_mean(x, out=wide[:, 5120:10240])
    assert torch.equal(wide[:, 5120:10240], stream_mean(x)) and not wide[:, :5120].any()
    table = rows_of(50, 256).bfloat16().cuda()
    ids = torch.tensor([3, -1, 49], dtype=torch.int32, device="cuda")
    assert torch.equal(embed_streams(table, ids, 4).cpu(), embed_streams(table.cpu(), ids.cpu(), 4))
