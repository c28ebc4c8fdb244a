"""Products of few rows in one launch: plans; it compiles everywhere; on a GPU bits of rows.cu."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tests.kernels.exl3_data import random_matrix
from torch import Tensor

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.exl3 import Codebook
from twinspark.kernels.exl3 import cuda as exl3_cuda
from twinspark.kernels.exl3 import joined as exl3_joined_
from twinspark.kernels.exl3.cuda import WHOLE_SOURCE, CudaExl3, exl3_rows, prepare_exl3_cuda
from twinspark.kernels.exl3.cuda_plan import (
    Device,
    WholePlan,
    plan_whole,
    whole_defines,
    whole_plan,
)
from twinspark.kernels.exl3.joined import CudaExl3Joined, joined_sums
from twinspark.kernels.exl3.joined import cuda_variants as joined_variants
from twinspark.kernels.exl3.many import cuda_variants as rows_variants

H200 = Device(processors=132, shared=232448, wgmma=True)
GB10 = Device(processors=48, shared=101376, wgmma=False)
PRODUCTS = [(5120, 1792, True), (1280, 16384, False), (4096, 5120, False)]  # of a layer
BLOCKS = [(8, 3), (8, 1), (8, 2), (2, 5), (4, 2)]  # warps across, chunks: the last two for sums
Plan = Callable[..., WholePlan | None]


def plan_of(rows: int = 1, inputs: int = 1280, outputs: int = 16384, **spec: int) -> WholePlan:
    plan = whole_plan(rows, inputs, outputs, 5, H200, **{"across": 8, "depth": 3, **spec})
    assert plan is not None
    return plan


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rows", [1, 6, 24])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_it_compiles(blocks: tuple[int, int], rows: int, arch: str) -> None:
    across, depth = blocks
    rehearsed = rows == 1 and across == 8
    plan = plan_of(rows, across=across, depth=depth, raw=across < 8, rehearsed=rehearsed)
    defines = whole_defines(across - rows % 5, list(Codebook)[depth % 3], plan)
    cubin = compile_cubin(WHOLE_SOURCE, arch=arch, defines=defines)
    assert b"exl3_whole" in cubin and (b"exl3_whole_rotate" in cubin) is not plan.fused


def test_blocks_of_a_cluster() -> None:
    alone = plan_of()
    assert (alone.slices, alone.threads, alone.width) == (1, 768, 128)
    along = plan_of(inputs=4096, outputs=4096, depth=2)
    assert (along.slices, along.threads) == (4, 512)
    left = plan_of(inputs=5120, outputs=1792, across=2, depth=5, raw=True)
    assert (left.slices, left.threads, left.width) == (2, 320, 32)
    # rows are rotated 128 columns at a time, and more than a tile of them once for all blocks
    assert along.fused and not left.fused and not plan_of(9).fused


def test_what_does_not_fit_has_no_plan() -> None:
    made = partial(whole_plan, outputs=5120, bits=5, across=8)
    assert made(1, 5120, device=H200, depth=1) is None  # ten blocks are no cluster
    assert made(1, 1280, device=H200, depth=3) is not None
    assert made(1, 1280, device=GB10, depth=3) is None  # 120 KB of weights
    assert made(24, 4096, device=H200, depth=3) is None


def test_products_of_a_layer_are_made_as_was_measured() -> None:
    def blocks(rows: int, product: tuple[int, int, bool]) -> tuple[int, int, bool] | None:
        *shape, raw = product
        plan = plan_whole(rows, *shape, 5, H200, raw=raw)
        return plan and (plan.across, plan.depth, plan.rehearsed)

    found = [[blocks(rows, product) for product in PRODUCTS] for rows in (1, 3, 4, 6, 8, 9, 24, 25)]
    few = [(8, 2, True), (8, 3, True), None]
    some = [(2, 5, False), (8, 3, False), None]
    many = [None, (8, 3, False), None]
    assert found == [few, few, some, some, some, many, many, [None] * 3]
    for inputs, outputs, raw in PRODUCTS:
        assert plan_whole(1, inputs, outputs, 5, H200, raw=not raw) is None
        assert plan_whole(1, inputs, outputs, 5, GB10, raw=raw) is None
        for bits in range(1, 9):  # wider weights need not fit
            plan = plan_whole(8, inputs, outputs, bits, H200, raw=raw)
            assert plan is None or plan.shared + 2048 <= H200.shared


def test_variants_are_those_that_plans_ask_for() -> None:
    for inputs, outputs, raw in PRODUCTS:
        variants = joined_variants if raw else rows_variants
        found = list(variants(inputs, outputs, 5, Codebook.MUL1, H200))
        for rows in (1, 6, 24):
            plan = plan_whole(rows, inputs, outputs, 5, H200, raw=raw)
            if plan is not None:
                assert (WHOLE_SOURCE, whole_defines(5, Codebook.MUL1, plan)) in found


@pytest.mark.parametrize("device", [H200, GB10], ids=["H200", "GB10"])
def test_shared_memory_is_for_so_many_blocks(device: Device) -> None:
    for outputs in (1024, 5120, 16384):
        for across, depth in BLOCKS:
            plan = whole_plan(1, 1280, outputs, 3, device, across, depth, raw=across < 8)
            if plan is None:
                continue
            load = -(-outputs // plan.width * plan.slices // device.processors)
            assert plan.shared <= device.shared - 2048
            assert (load + 1) * (plan.shared + 1024) > device.shared


# ---- on a GPU


def matrices(count: int, inputs: int, outputs: Sequence[int], bits: int = 5) -> list[CudaExl3]:
    device = torch.device("cuda", 0)
    # seeds a multiple of three apart have one codebook
    made = [
        random_matrix(inputs, outputs[n % len(outputs)], bits2=2 * bits, seed=3 * n)
        for n in range(count)
    ]
    return [prepare_exl3_cuda(matrix.to(device)) for matrix in made]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], None]:
    """Lets tests say how products are spread."""

    def use(plan: Plan) -> None:
        for module in (exl3_cuda, exl3_joined_):
            monkeypatch.setattr(module, "whole_plan_of", plan)

    return use


def no_plan(*_: object, **__: object) -> None:
    return None


def spread(across: int, depth: int, *, rehearsed: bool = False) -> Plan:
    def plan(
        index: int, rows: int, inputs: int, outputs: int, bits: int, raw: bool = False
    ) -> WholePlan | None:
        if rows > 24 or not (raw or across == 8):
            return None
        return whole_plan(
            rows, inputs, outputs, bits, exl3_cuda.device_of(index), across, depth,
            raw=raw, rehearsed=rehearsed and rows <= 8 and across == 8,
        )  # fmt: skip

    return plan


def all_products(x: Tensor, own: list[CudaExl3]) -> list[Tensor]:
    """Of one matrix, and sums of all of them."""
    rows = len(x)
    sums, chunks = joined_sums(x, CudaExl3Joined(tuple(own)))
    first, added = 0, []
    for matrix in own:
        size = chunks * rows * matrix.out_features
        parts = sums[first : first + size].view(chunks, rows, -1)
        first += size
        whole = parts[0].clone()
        for part in parts[1:]:
            whole += part
        added.append(whole)
    return [exl3_rows(x, own[0], out_dtype=torch.float32), *added]


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_every_product_has_the_bits_of_rows_cu(
    blocks: tuple[int, int], planned: Callable[[Plan], None]
) -> None:
    for inputs, outputs in ((1152, (256, 128, 384)), (640, (512, 128))):
        own = matrices(len(outputs), inputs, outputs)
        for rows in (1, 6, 8, 17, 24, 33):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            planned(no_plan)
            wanted = all_products(x, own)
            for rehearsed in (False, True):
                planned(spread(*blocks, rehearsed=rehearsed))
                found = all_products(x, own)
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), rows


@pytest.mark.gpu
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_products_of_a_layer_have_the_bits_of_rows_cu(
    product: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, outputs, raw = product
    own = matrices(2, inputs, (outputs - 512, 512)) if raw else matrices(1, inputs, (outputs,))
    for rows in (1, 3, 4, 6, 8, 9, 24):
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        with monkeypatch.context() as without:
            for module in (exl3_cuda, exl3_joined_):
                without.setattr(module, "whole_plan_of", no_plan)
            wanted = all_products(x, own)
        found = all_products(x, own)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), rows


@pytest.mark.gpu
def test_biases_dtypes_and_rows_that_are_not_numbers(planned: Callable[[Plan], None]) -> None:
    for bits in (2, 3, 6):
        matrix = random_matrix(2304, 640, bits2=2 * bits, seed=2, bias=True)
        prepared = prepare_exl3_cuda(matrix.to(torch.device("cuda", 0)))
        for rows, dtype in ((1, torch.float32), (6, torch.float16), (8, torch.bfloat16)):
            x = torch.randn(rows, 2432, device="cuda").to(dtype)[:, 128:]
            if rows > 3:
                x[2] = float("nan")
            planned(no_plan)
            wanted = exl3_rows(x, prepared)
            planned(spread(8, 2, rehearsed=True))
            found = exl3_rows(x, prepared, out=torch.full_like(wanted, 7.0))
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.gpu
def test_captured_equals_eager(planned: Callable[[Plan], None]) -> None:
    own = matrices(2, 1280, (1280, 1280))
    for blocks in BLOCKS:
        planned(spread(*blocks, rehearsed=True))
        for rows in (1, 6, 24):
            x = torch.randn(rows, 1280, device="cuda").bfloat16()
            wanted = exl3_rows(exl3_rows(x, own[0]), own[1])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = exl3_rows(exl3_rows(x, own[0]), own[1])
            for _ in range(20):
                found.zero_()
                graph.replay()
                assert torch.equal(found, wanted)
