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
from twinspark.kernels.exl3 import many as exl3_many_
from twinspark.kernels.exl3.cuda import WHOLE_SOURCE, CudaExl3, exl3_rows, prepare_exl3_cuda
from twinspark.kernels.exl3.cuda_plan import Device, WholePlan, whole_defines, whole_plan
from twinspark.kernels.exl3.joined import CudaExl3Joined, exl3_joined, joined_sums
from twinspark.kernels.exl3.many import exl3_many, prepare_many

H200 = Device(processors=132, shared=232448, wgmma=True)
GB10 = Device(processors=48, shared=101376, wgmma=False)
BLOCKS = [(8, 3), (8, 1), (4, 2), (2, 3), (1, 3)]  # warps across, chunks: clusters of 1 to 8 blocks
Plan = Callable[..., WholePlan | None]


def plan_of(rows: int = 1, inputs: int = 1280, outputs: int = 16384, **spec: int) -> WholePlan:
    plan = whole_plan(rows, inputs, outputs, 5, H200, **{"across": 8, "depth": 3, **spec})
    assert plan is not None
    return plan


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_it_compiles(blocks: tuple[int, int], raw: bool, arch: str) -> None:
    across, depth = blocks
    fused, early = across < 8, 4 * (depth % 2)
    plan = plan_of(across + 1, across=across, depth=depth, raw=raw, fused=fused, early=early)
    defines = whole_defines(across, list(Codebook)[depth % 3], plan)
    cubin = compile_cubin(WHOLE_SOURCE, arch=arch, defines=defines)
    assert b"exl3_whole" in cubin and (b"exl3_whole_rotate" in cubin) is not fused


def test_blocks_of_a_cluster() -> None:
    alone = plan_of()
    assert (alone.cluster, alone.threads, alone.width) == (1, 768, 128)
    along = plan_of(inputs=4096, outputs=4096, depth=2)
    assert (along.slices, along.cluster, along.threads) == (4, 4, 512)
    beside = plan_of(inputs=4096, outputs=4096, across=2, depth=8)
    assert (beside.slices, beside.cluster, beside.width) == (1, 4, 128)
    left = plan_of(inputs=5120, outputs=1792, across=2, depth=5, raw=True)
    assert (left.slices, left.cluster, left.width) == (2, 2, 32)


def test_what_does_not_fit_has_no_plan() -> None:
    made = partial(whole_plan, outputs=5120, bits=5, across=8)
    assert made(1, 5120, device=H200, depth=1) is None  # ten blocks are no cluster
    assert made(1, 1280, device=H200, depth=3) is not None
    assert made(1, 1280, device=GB10, depth=3) is None  # 100 KB of weights
    assert made(24, 4096, device=H200, depth=3) is None


@pytest.mark.parametrize("device", [H200, GB10], ids=["H200", "GB10"])
def test_shared_memory_is_for_so_many_blocks(device: Device) -> None:
    for outputs in (1024, 5120, 16384):
        for across, depth in BLOCKS:
            plan = whole_plan(1, 1280, outputs, 3, device, across=across, depth=depth)
            if plan is None:
                continue
            load = -(-outputs // 128 * plan.cluster // device.processors)
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
        for module in (exl3_cuda, exl3_joined_, exl3_many_):
            monkeypatch.setattr(module, "whole_plan_of", plan)

    return use


def no_plan(*_: object, **__: object) -> None:
    return None


def spread(across: int, depth: int, early: int, *, fused: bool | None = None) -> Plan:
    def plan(
        index: int, rows: int, inputs: int, outputs: int, bits: int, raw: bool = False
    ) -> WholePlan | None:
        found = whole_plan(
            rows, inputs, outputs, bits, exl3_cuda.device_of(index),
            across=across, depth=depth, raw=raw, early=early if rows <= 8 else 0, fused=fused,
        )  # fmt: skip
        return found if rows <= 24 else None

    return plan


def all_products(x: Tensor, own: list[CudaExl3]) -> list[Tensor]:
    """One matrix, all of them on the same rows, their sums, and each on rows of its own."""
    count, rows = len(own), len(x)
    joined = CudaExl3Joined(tuple(own))
    dtypes = [(torch.bfloat16, torch.float32, torch.float16)[n % 3] for n in range(count)]
    sums, chunks = joined_sums(x, joined)
    total, first, added = sums.view(-1), 0, []
    for matrix in own:
        size = chunks * rows * matrix.out_features
        parts = total[first : first + size].view(chunks, rows, -1)
        first += size
        whole = parts[0].clone()
        for part in parts[1:]:
            whole += part
        added.append(whole)
    found = [exl3_rows(x, own[0], out_dtype=torch.float32), *exl3_joined(x, joined, dtypes)]
    alike = [own[0]] * count
    each = torch.stack([x.roll(n, 0) for n in range(count)], 1).transpose(0, 1)
    out = torch.full((rows, count, own[0].out_features), torch.nan, device="cuda").bfloat16()
    exl3_many(each, prepare_many(alike), out.transpose(0, 1))
    return [*found, *added, out]


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
            for early, fused in ((0, True), (0, False), (8, None)):
                planned(spread(*blocks, early, fused=fused))
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
            planned(spread(4, 2, 2))
            found = exl3_rows(x, prepared, out=torch.full_like(wanted, 7.0))
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.gpu
def test_captured_equals_eager(planned: Callable[[Plan], None]) -> None:
    own = matrices(2, 1280, (1280, 1280))
    for blocks in BLOCKS:
        planned(spread(*blocks, 0))
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
