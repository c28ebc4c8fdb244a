"""Attention over cached rows: the reference on the CPU; on a GPU float64, bits and addresses."""

import pytest
import torch
from tests.kernels.attention_data import PAGE_ROWS, packed_pages, part_of, problem
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels import rounding
from twinspark.kernels.attention import RowSource, attend_rows, cuda
from twinspark.kernels.attention.inputs import Inputs
from twinspark.kernels.attention.plan import (
    TILES,
    Device,
    Spread,
    Work,
    plan,
    shared_asked,
    shared_of,
    why_not,
)
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.rope import rotate
from twinspark.kernels.sparse_attention import sparse_attention

H200 = Device(processors=132, shared=232448, wgmma=True)
GB10 = Device(processors=48, shared=101376, wgmma=False)
DEVICES = {"sm_90a": H200, "sm_121": GB10}
# heads, head size, rotated pairs, window, selected rows: full size, no long-range rows, the
# demo pack, TINY, odd sizes
SHAPES = [
    (32, 512, 32, 128, 512),
    (64, 512, 32, 128, 0),
    (4, 128, 16, 64, 128),
    (2, 128, 16, 16, 8),
    (6, 256, 16, 24, 40),
]


def attend(inputs: Inputs) -> Tensor:
    return attend_rows(*inputs[:8], scale=inputs.scale)


def exact(inputs: Inputs) -> Tensor:
    """Float64 from the rotated queries on, which are rounded to bf16 as the op does."""
    size = inputs.q_TNH.shape[2]
    rows = inputs.window.read(inputs.window_TW, torch.float64, size)
    index = inputs.window_TW
    if inputs.pool is not None and inputs.pool_TK is not None:
        rows = torch.cat([inputs.pool.read(inputs.pool_TK, torch.float64, size), rows], dim=1)
        index = torch.cat([inputs.pool_TK, index], dim=1)
    valid = index >= 0
    q = rotate(inputs.q_TNH, inputs.cos_TP, inputs.sin_TP).double()
    rows = rows.masked_fill(~valid[:, :, None], 0.0)
    o = sparse_attention(q, rows, valid, inputs.sink_N.double(), scale=inputs.scale)
    return rotate(o, inputs.cos_TP, -inputs.sin_TP)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_kernels_compile(shape: tuple[int, int, int, int, int], arch: str) -> None:
    variants = list(cuda.cuda_variants(*shape, DEVICES[arch]))
    sources = {source.name for source, _ in variants}
    full_h200 = shape[1] == 512 and arch == "sm_90a"
    assert sources >= {"rows.cu"} and ("prompt.cu" in sources) == full_h200
    assert ("portable.cu" in sources) == (shape[1] == 512)
    for source, defines in variants:
        if defines.get("HEADS", 8) == min(shape[0], 16) or source.name != "rows.cu":
            assert compile_cubin(source, arch=arch, defines=defines)[:4] == b"\x7fELF"


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_fit_the_device(shape: tuple[int, int, int, int, int], device: Device) -> None:
    heads, size, _, window, pool = shape
    for queries in (1, 2, 6, 24, 64, 65, 300, 4096):
        work = Work(queries, heads, size, window, pool)
        spread = plan(work, device)
        assert why_not(spread, work, device) is None
        assert shared_of(spread, size) <= shared_asked(spread, work, device) < device.shared
        many = queries * -(-heads // 32) >= (64 if pool else 128)
        is_prompt = device.wgmma and size == 512 and many
        some = "portable" if size == 512 else "whole"
        few = "split" if queries <= 64 else some
        assert spread.kind == ("prompt" if is_prompt else few)


def test_long_lists_have_a_kernel() -> None:
    assert plan(Work(1, 32, 512, 128, 2048), H200).kind == "split"
    assert plan(Work(100, 32, 512, 128, 40), H200).kind == "whole"
    assert plan(Work(24, 64, 512, 128, 512), H200).kind == "split"
    assert plan(Work(320, 64, 512, 128, 512), H200).kind == "prompt"
    for heads, queries in ((32, 64), (64, 32)):  # 64 times 32 heads
        assert plan(Work(queries, heads, 512, 128, 512), H200).kind == "prompt"
        assert plan(Work(queries - 1, heads, 512, 128, 512), H200).kind == "split"
    assert plan(Work(320, 64, 512, 128, 512), GB10).kind == "portable"
    assert plan(Work(320, 16, 512, 128, 512), GB10).kind == "whole"  # half of its heads are none
    assert plan(Work(320, 64, 512, 128, 40), GB10).kind == "whole"
    assert plan(Work(320, 64, 512, 0, 512), H200).kind == "whole"  # prompt.cu reads a window ahead


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_against_float64(shape: tuple[int, int, int, int, int], packed: bool) -> None:
    inputs = problem(5, *shape, packed=packed)
    o, expected = attend(inputs), exact(inputs)
    assert o.dtype == torch.bfloat16
    assert (o.double() - expected).norm() < 2.2e-3 * expected.norm()
    assert not o[3].any()  # nothing listed
    plain = attend(problem(5, *shape, packed=False))
    assert torch.equal(o, plain)


def test_float64_is_computed_in_float64() -> None:
    inputs = problem(5, *SHAPES[2], packed=False, dtype=torch.float64)
    torch.testing.assert_close(attend(inputs), exact(inputs), rtol=1e-12, atol=1e-12)


def test_what_is_not_listed_does_not_matter() -> None:
    inputs = problem(5, *SHAPES[2], packed=False)
    expected = attend(inputs)
    unlisted = torch.ones(len(inputs.window.values), dtype=torch.bool)
    unlisted[inputs.window_TW[inputs.window_TW >= 0].long()] = False
    inputs.window.values[unlisted] = torch.nan
    assert unlisted.any() and torch.equal(attend(inputs), expected)


def test_refusals() -> None:
    inputs = problem(5, *SHAPES[2], packed=True)
    with pytest.raises(ValueError, match="window list must be contiguous torch.int32"):
        attend(inputs._replace(window_TW=inputs.window_TW.long()))
    with pytest.raises(ValueError, match="come together"):
        attend(inputs._replace(pool=None))
    with pytest.raises(ValueError, match=r"compressed rows of 128 values need .* 1152 bytes"):
        wrong = RowSource("compressed", torch.zeros(2, 1151, dtype=torch.uint8), None, PAGE_ROWS)
        attend(inputs._replace(pool=wrong))
    with pytest.raises(ValueError, match="scales are for packed rows"):
        attend(inputs._replace(window=inputs.window._replace(scales=None)))
    with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \(5, 4, 128\)"):
        attend_rows(*inputs[:8], scale=1.0, out=torch.zeros(5, 4, 128))
    with pytest.raises(KernelUnsupported, match="needs a CUDA device, the tensors are on cpu"):
        cuda.attend(inputs, torch.empty_like(inputs.q_TNH))


# ---- on a GPU


def spread_out(inputs: Inputs, spread: Spread | None) -> Tensor:
    out = torch.full_like(inputs.q_TNH, float("nan"))
    cuda.attend(inputs, out, spread)
    return out


def spreads(inputs: Inputs) -> list[Spread]:
    num, heads, size = inputs.q_TNH.shape
    pool = 0 if inputs.pool_TK is None else inputs.pool_TK.shape[1]
    work = Work(num, heads, size, inputs.window_TW.shape[1], pool)
    index = torch.cuda.current_device()
    tiles = [tile for tile in TILES if tile < heads + 8]
    every = [Spread("split", tile) for tile in tiles]
    device = cuda._device(index)
    every += [Spread("prompt", 32), Spread("portable", 32), Spread("whole", tiles[-1])]
    return [s for s in every if why_not(s, work, device) is None]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_every_spread_has_the_same_bits(
    shape: tuple[int, int, int, int, int], packed: bool
) -> None:
    inputs = problem(24, *shape, packed=packed, device="cuda")
    expected = exact(inputs)
    base = spread_out(inputs, None)
    # weights are rounded to bf16, the result too: 1.1e-3 and 1.7e-3, relative rms
    assert (base.double() - expected).norm() < 2.6e-3 * expected.norm()
    for spread in spreads(inputs):
        assert torch.equal(spread_out(inputs, spread), base), spread
    for first in (0, 3, 17, 23):
        alone = spread_out(part_of(inputs, slice(first, first + 1)), None)
        assert torch.equal(alone[0], base[first]), first
    other = problem(24, *shape, packed=not packed, device="cuda")
    assert torch.equal(spread_out(other, None), base)
    for spread in spreads(inputs):  # a ring of one kind and pages of the other
        mixed = spread_out(inputs._replace(window=other.window), spread)
        assert torch.equal(mixed, base), spread


@pytest.mark.gpu
def test_many_queries_have_the_bits_of_few() -> None:
    inputs = problem(700, *SHAPES[0], packed=True, device="cuda")
    many = spread_out(inputs, None)
    for first in range(0, 700, 24):
        rows = slice(first, first + 24)
        assert torch.equal(spread_out(part_of(inputs, rows), None), many[rows])
    portable = Spread("portable", 32)
    assert torch.equal(spread_out(inputs, portable), many)  # several items a thread block
    for queries in (133, 397):
        part = part_of(inputs, slice(queries))
        assert torch.equal(spread_out(part, portable), many[:queries])


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [6, 64])
def test_a_graph_has_the_bits_of_eager_calls(queries: int) -> None:
    inputs = problem(queries, *SHAPES[0], packed=True, device="cuda")
    expected, out = spread_out(inputs, None), torch.empty_like(inputs.q_TNH)
    cuda.attend(inputs, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.attend(inputs, out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_unlisted_rows_may_be_anything_on_gpu() -> None:
    inputs = problem(24, *SHAPES[0], packed=False, device="cuda")
    expected = spread_out(inputs, None)
    unlisted = torch.ones(len(inputs.window.values), dtype=torch.bool, device="cuda")
    unlisted[inputs.window_TW[inputs.window_TW >= 0].long()] = False
    inputs.window.values[unlisted] = float("nan")
    assert torch.equal(spread_out(inputs, None), expected)


@pytest.mark.gpu
def test_packed_rows_that_are_not_listed_may_be_infinite_on_gpu() -> None:
    """Row 0 is what kernels read where nothing is listed."""
    inputs = problem(140, *SHAPES[0], packed=True, device="cuda")
    listed = inputs._replace(
        window_TW=inputs.window_TW.masked_fill(inputs.window_TW == 0, -1).contiguous()
    )
    expected = spread_out(listed, Spread("split", 32))
    scales = listed.window.scales
    assert scales is not None and expected.isfinite().all()
    listed.window.values.view(torch.uint8)[0] = 0x7E
    scales.view(torch.uint8)[0] = 255
    for spread in spreads(listed):
        assert torch.equal(spread_out(listed, spread), expected), spread


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [40, 64])
def test_many_items_of_a_thread_block(heads: int, packed: bool) -> None:
    inputs = problem(300, heads, *SHAPES[0][1:], packed=packed, device="cuda")
    expected = spread_out(inputs, Spread("whole", 16))
    for spread in spreads(inputs):
        assert torch.equal(spread_out(inputs, spread), expected), spread


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_source_without_rows_on_gpu(packed: bool) -> None:
    inputs = problem(24, *SHAPES[0], packed=packed, device="cuda")
    assert inputs.pool is not None and inputs.pool_TK is not None
    none = inputs._replace(pool_TK=torch.full_like(inputs.pool_TK, -1))
    empty = none._replace(pool=inputs.pool._replace(values=inputs.pool.values[:0]))
    expected = spread_out(none, Spread("split", 32))
    for spread in spreads(none):
        assert torch.equal(spread_out(empty, spread), expected), spread


@pytest.mark.gpu
def test_pages_beyond_two_gigabytes() -> None:
    inputs = problem(5, *SHAPES[0], packed=True, device="cuda")
    assert inputs.pool is not None and inputs.pool_TK is not None
    pages, size = inputs.pool.values.shape
    far = 2**31 // size + 100
    values = torch.zeros(far + pages, size, dtype=torch.uint8, device="cuda")
    values[far:] = inputs.pool.values
    moved = torch.where(inputs.pool_TK >= 0, inputs.pool_TK + far * PAGE_ROWS, -1).int()
    there = inputs._replace(pool=inputs.pool._replace(values=values), pool_TK=moved)
    for spread in spreads(inputs):
        assert torch.equal(spread_out(there, spread), spread_out(inputs, spread)), spread


def test_pages_are_read_as_they_were_packed() -> None:
    rows = rounding.qdq4x16(torch.randn(32, 128, generator=torch.Generator().manual_seed(0)))
    source = packed_pages(rows)
    index = torch.tensor([[0, 31], [17, -1]])
    read = source.read(index, torch.float32, 128)
    assert torch.equal(read[0], rows[[0, 31]]) and torch.equal(read[1, 0], rows[17])
