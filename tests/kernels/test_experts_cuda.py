"""CUDA body of an MoE layer: it compiles for both devices; on a GPU its bits and float64."""

import re
from dataclasses import replace

import pytest
import torch
from tests.kernels.exl3_data import random_matrix
from tests.kernels.test_experts import LIMIT, routing, rows_of, shard_matrices
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.exl3 import Exl3Matrix
from twinspark.kernels.exl3.cuda_plan import Device
from twinspark.kernels.experts import (
    ShardExperts,
    begin_experts,
    cuda,
    experts_forward,
    few,
    prepare_shard_experts,
    route_rows,
)
from twinspark.kernels.experts.cuda import (
    MOST_PLACES,
    PROMPT_SOURCE,
    ROUTE_SOURCE,
    CudaShardExperts,
    prepare_cuda,
)
from twinspark.kernels.experts.few import DECODE_SOURCE, RECORD_BYTES, FewRows, Routed
from twinspark.kernels.experts.plan import (
    DECODE_ROWS,
    decode_defines,
    item_blocks,
    num_units,
    plan_decode,
    plan_group,
    plan_prompt,
    plan_router,
    plan_select,
    prompt_defines,
    router_defines,
    window_bounds,
)

SHARED = {"sm_90a": 232448, "sm_121": 101376}
DEVICES = {
    "sm_90a": Device(processors=132, shared=SHARED["sm_90a"], wgmma=True),
    "sm_121": Device(processors=48, shared=SHARED["sm_121"], wgmma=False),
}
GPU_SHAPES = [(256, 128, 10, 3), (1152, 256, 20, 6), (640, 384, 12, 4)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decode_compiles(arch: str) -> None:  # all widths are in one kernel
    for warps, codebooks in ((8, 1), (4, 6)):
        assert plan_decode(5120, 8, 6, 10**6 if warps == 8 else 1, 132).warps == warps
        cubin = compile_cubin(DECODE_SOURCE, arch=arch, defines=decode_defines(warps, codebooks))
        names = (b"experts_hidden", b"experts_act", b"experts_down", b"experts_combine")
        assert all(name in cubin for name in (*names, b"experts_list"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompt_compiles(arch: str) -> None:
    plan = plan_prompt(SHARED[arch], wgmma=arch == "sm_90a")
    assert plan.threads % 128 == 0 or not plan.wgmma  # registers pass between whole warpgroups
    cubin = compile_cubin(PROMPT_SOURCE, arch=arch, defines=prompt_defines(plan, 1))
    names = (b"experts_group", b"experts_group_together", b"experts_rotate", b"experts_tiles")
    assert all(name in cubin for name in (*names, b"experts_act_tiled", b"experts_add"))
    stacks = re.findall(rb"\x04\x11\x08\x00.{4}(.{4})", cubin, re.DOTALL)  # bytes, a kernel each
    assert len(stacks) >= 5 and set(stacks) == {bytes(4)}  # registers hold everything


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_router_compiles(pieces: int, arch: str) -> None:
    for rows in (8, 9, 257):
        plan = plan_router(rows, 5120, pieces, 384, DEVICES[arch])
        defines = router_defines(plan, pieces, 384)
        cubin = compile_cubin(ROUTE_SOURCE, arch=arch, defines=defines)
        names = (plan.kernel.encode(), b"router_select", b"router_select_rows")
        assert all(name in cubin for name in names)
        stacks = re.findall(rb"\x04\x11\x08\x00.{4}(.{4})", cubin, re.DOTALL)
        assert len(stacks) >= 3 and set(stacks) == {bytes(4)}  # registers hold everything
    for experts in (7, 512, 1023):  # lanes hold one row of up to 512
        defines = router_defines(plan, pieces, experts)
        cubin = compile_cubin(ROUTE_SOURCE, arch=arch, defines=defines)
        assert plan_select(1000, experts)[0].encode() + b"\0" in cubin


@pytest.mark.parametrize(
    ("rows", "kernel", "groups", "split"),
    [
        (256, "router_logits", 0, True),
        (257, "router_logits_wide", 3, True),
        (2112, "router_logits_wide", 3, True),  # 66 blocks would leave half of 132 idle
        (2113, "router_logits_wide", 3, False),
        (4096, "router_logits_wide", 3, False),
    ],
)
def test_router_blocks_of_a_full_size_layer(
    rows: int, kernel: str, groups: int, split: bool
) -> None:
    plan = plan_router(rows, 5120, 1, 384, DEVICES["sm_90a"])
    assert (plan.kernel, plan.split) == (kernel, split)
    assert router_defines(plan, 1, 384)["WIDE"] == groups
    if groups:
        assert plan.threads == 128 * (groups + 1) and plan.row_tiles == 8
    # not wider weights, other devices or inputs that are no whole parts
    assert plan_router(rows, 5120, 2, 384, DEVICES["sm_90a"]).kernel != "router_logits_wide"
    assert plan_router(rows, 5120, 1, 384, DEVICES["sm_121"]).kernel != "router_logits_wide"
    assert plan_router(rows, 96, 1, 384, DEVICES["sm_90a"]).kernel == "router_logits"


def test_choices_and_groups_by_rows() -> None:
    assert plan_select(1, 384) == ("router_select", 1, 384)
    assert plan_select(256, 8) == ("router_select", 256, 128)
    assert plan_select(257, 384) == ("router_select_rows", 65, 128)
    assert plan_select(257, 513) == ("router_select", 257, 128)
    assert plan_group(4096, together=True) == ("experts_group", 1)
    assert plan_group(4097, together=True) == ("experts_group_together", 8)
    assert plan_group(4097, together=False) == ("experts_group", 1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_plans_fit_the_devices(bits: int) -> None:
    for arch, shared in SHARED.items():
        plan = plan_prompt(shared, wgmma=arch == "sm_90a")
        stage = plan.rows * 256 + 2048 * bits
        assert plan.ring >= 2 * stage and plan.resident * (plan.shared + 1536) <= shared + 1024
        for inputs in (128, 640, 1152, 5120):
            for blocks in (1, 10**6):
                assert plan_decode(inputs, bits, 6, blocks, 132).shared + 1536 <= shared
        for pieces in (1, 2, 3):
            router = plan_router(4096, 5120, pieces, 384, DEVICES[arch])
            assert router.stages >= 2 or router.kernel == "router_logits_wide"
            assert router.shared + 1536 <= shared


@pytest.mark.parametrize(
    ("rows", "hidden", "down"), [(1, 8, 8), (2, 8, 8), (6, 8, 4), (24, 8, 8), (64, 8, 8)]
)
def test_warps_of_a_full_size_layer(rows: int, hidden: int, down: int) -> None:
    busy = rows + 1
    blocks = 2 * busy * num_units(5120) * 1152 // 128, busy * num_units(1152) * 5120 // 128
    assert plan_decode(5120, 3, rows, blocks[0], 132).warps == hidden  # as measured
    assert plan_decode(1152, 3, rows, blocks[1], 132).warps == down
    assert plan_decode(256, 3, rows, 20, 132).warps == 4  # large blocks would leave most idle


def test_units_and_windows() -> None:
    assert [num_units(k) for k in (128, 256, 512, 640, 768, 1152, 5120)] == [1, 1, 1, 1, 2, 2, 10]
    assert window_bounds(65, 6, 384, 80)[0] == 1
    windows, window, items = window_bounds(4096, 6, 384, 80)
    assert windows * window >= 4096 * 7 + 385 * 7 and window % 8 == 0
    assert items >= window / 80 + 385


@pytest.mark.parametrize("rows", [65, 256, 1024, 4096, 8192])
def test_blocks_of_even_routing_take_one_or_two_items(rows: int) -> None:
    sizes = rows, 6, 384, 80
    windows, window, most = window_bounds(*sizes)
    blocks = item_blocks(*sizes)
    assert 1 <= blocks <= most
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, 384, generator=generator).argsort(dim=1)[:, :6]
    counts = [*torch.bincount(ids.flatten(), minlength=384).tolist(), rows]
    items, start = [0] * windows, 0
    for count in counts:  # as experts_group cuts them
        for w in range(windows):
            inside = min(start + count, (w + 1) * window) - max(start, w * window)
            items[w] += -(-max(inside, 0) // 80)
        start += -(-count // 8) * 8
    assert sum(items) >= sum(count > 0 for count in counts) and start <= windows * window
    assert max(items) <= most and max(items) <= 1.25 * blocks


def test_records_are_what_the_kernels_read() -> None:
    text = DECODE_SOURCE.read_text()
    for name, value in (("MOST_ROWS", DECODE_ROWS), ("MOST_PLACES", MOST_PLACES + 1)):
        assert re.search(rf"#define {name} {value}\n", text), name
    assert RECORD_BYTES == 16 + 2 * DECODE_ROWS and RECORD_BYTES % 16 == 0  # one load of 16 bytes


def test_refusals_without_a_gpu() -> None:
    with pytest.raises(KernelUnsupported, match="needs a CUDA device, the tensors are on cpu"):
        prepare_cuda(*shard_matrices(128, 128, 2), limit=1.0)


# ---- on a GPU


def on_gpu(lists: list[list[Exl3Matrix]]) -> ShardExperts:
    moved = [
        [Exl3Matrix(m.trellis.cuda(), m.suh.cuda(), m.svh.cuda(), m.codebook) for m in one]
        for one in lists
    ]
    return prepare_shard_experts(*moved, limit=LIMIT)


def call(rows: slice, given: tuple[Tensor, ...], shards: list[ShardExperts]) -> Tensor:
    x, ids, weights, kept = (t[rows].contiguous() for t in given)
    return experts_forward(x, ids, weights, kept, shards)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_bits_do_not_depend_on_the_call_and_float64_agrees(shape: tuple[int, ...]) -> None:
    hidden, width, experts, active = shape
    lists = [shard_matrices(hidden, width, experts, shard) for shard in range(2)]
    shards, plain = (
        [on_gpu(one) for one in lists],
        [prepare_shard_experts(*one, limit=LIMIT) for one in lists],
    )
    num = 333
    x, (ids, weights) = rows_of(num, hidden), routing(num, active, experts)
    ids[7] = -1
    kept = torch.rand(num, active, generator=torch.Generator().manual_seed(4)) < 0.8
    given = (x.cuda(), ids.cuda(), weights.cuda(), kept.cuda())
    many = call(slice(None), given, shards)
    assert many.isfinite().all()
    alone = torch.cat([call(slice(i, i + 1), given, shards) for i in range(64)], dim=1)
    assert torch.equal(many[:, :64], alone)
    for count in (2, 3, 6, 24, 64, 65, 130):  # both kernels
        for first in (0, 5, num - count):
            rows = slice(first, first + count)
            assert torch.equal(call(rows, given, shards), many[:, rows]), (count, first)
    exact = experts_forward(x[:40].double(), ids[:40], weights[:40].double(), kept[:40], plain)
    body = experts_forward(x[:40], ids[:40], weights[:40], kept[:40], plain)
    most = 1.2 * (body.double() - exact).norm()
    assert (many[:, :40].cpu().double() - exact).norm() < most


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 6, 70, 300])
def test_rows_may_begin_anywhere(num: int) -> None:
    shards = [on_gpu(shard_matrices(640, 256, 12))]
    x, (ids, weights) = rows_of(num, 640).cuda(), routing(num, 4, 12)
    room = torch.empty(num * 640 + 4, dtype=torch.bfloat16, device="cuda")
    apart = room[4:].view(num, 640).copy_(x)
    assert apart.data_ptr() % 16 and apart.is_contiguous()
    routed = ids.cuda(), weights.cuda(), None
    usual = experts_forward(x, *routed, shards)
    assert torch.equal(experts_forward(apart, *routed, shards), usual)
    weight = torch.randn(12, 640, device="cuda").bfloat16()
    bias = torch.zeros(12, device="cuda")
    one, other = (route_rows(rows, weight, bias, k=4, scale=1.0) for rows in (x, apart))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.gpu
def test_captured_equals_eager() -> None:
    shards = [on_gpu(shard_matrices(640, 256, 12))]
    x, (ids, weights) = rows_of(200, 640), routing(200, 4, 12)
    given = (x.cuda(), ids.cuda(), weights.cuda(), torch.ones(200, 4).bool().cuda())
    for num in (1, 24, 200):
        rows = slice(0, num)
        eager = call(rows, given, shards)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call(rows, given, shards) for _ in range(3)]
        for _ in range(5):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(out, eager) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(256,), (256, 256), (256, 384)])
def test_shared_expert_beside_the_router_changes_no_bit(widths: tuple[int, ...]) -> None:
    shards = [on_gpu(shard_matrices(640, width, 12)) for width in widths]
    x, (ids, weights) = rows_of(65, 640), routing(65, 4, 12)
    kept = torch.arange(65 * 4).view(65, 4) % 3 > 0
    x, ids, weights, kept = x.cuda(), ids.cuda(), weights.cuda(), kept.cuda()
    assert begin_experts(x[:6], 4, shards) is None  # nothing is recorded
    for num in (1, 6, 24, 64, 65):
        given = [t[:num].contiguous() for t in (x, ids, weights, kept)]
        eager = experts_forward(*given, shards)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = []
            for _ in range(3):
                begun = begin_experts(given[0], 4, shards)
                assert (begun is None) == (num > 64)
                ids_TA = given[1].clone()  # what a router would do meanwhile
                outs.append(experts_forward(given[0], ids_TA, *given[2:], shards, begun))
        for _ in range(5):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(out, eager) for out in outs)


def experts_of(ids: Tensor, kept: Tensor | None) -> dict[int, list[int]]:
    """Experts that rows have, ascending, with their pairs: what the list must hold."""
    rows, places = ids.shape
    found: dict[int, list[int]] = {}
    for row in range(rows):
        for place in range(places):
            expert = int(ids[row, place])
            if expert >= 0 and (kept is None or kept[row, place]):
                found.setdefault(expert, []).append(row * (places + 1) + place)
    return dict(sorted(found.items()))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1, 2), (6, 6, 40), (24, 6, 384), (33, 7, 8), (64, 15, 1023)])
def test_list_of_experts(shape: tuple[int, int, int]) -> None:
    rows, places, experts = shape
    shard = on_gpu(shard_matrices(128, 128, 2))
    assert isinstance(shard, CudaShardExperts)
    shards = [replace(shard, num_experts=experts)]  # a list knows no matrix
    ids, weights = routing(rows, places, experts)
    absent = ids.clone()
    absent[rows // 2] = -1
    repeated = ids[:1].repeat(rows, 1)  # every row has the same
    kept = torch.rand(rows, places, generator=torch.Generator().manual_seed(2)) < 0.7
    for given, mask in ((ids, None), (ids, kept), (absent, kept), (repeated, None)):
        on = None if mask is None else mask.cuda().view(torch.uint8)
        few_rows = FewRows(rows_of(rows, 128).cuda(), places, shards)
        listed = few_rows.list_experts(Routed(given.cuda(), weights.cuda(), on)).cpu()
        assert listed.shape == (min(experts, rows * places), RECORD_BYTES)
        heads = listed.view(torch.int32)[:, :2].tolist()
        entries = listed.view(torch.int16)[:, 8:].int()
        want = experts_of(given, mask)
        assert [expert for expert, _ in heads[: len(want)]] == [*want]
        assert all(expert == -1 for expert, _ in heads[len(want) :])
        for (_, count), got, pairs in zip(heads, entries, want.values(), strict=False):
            assert count == len(pairs)
            assert (got[:count] & 1023).tolist() == pairs
            assert (got[:count] >> 10 & 63).tolist() == [p // (places + 1) for p in pairs]


@pytest.mark.gpu
def test_block_sizes_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [on_gpu(shard_matrices(640, 384, 12))]
    x, (ids, weights) = rows_of(24, 640), routing(24, 4, 12)
    given = (x.cuda(), ids.cuda(), weights.cuda(), torch.ones(24, 4).bool().cuda())
    narrow = call(slice(None), given, shards)
    monkeypatch.setattr(
        few, "plan_decode", lambda inputs, bits, *_: plan_decode(inputs, bits, 24, 10**6, 1)
    )
    assert torch.equal(call(slice(None), given, shards), narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [1, 8])
def test_products_without_wgmma_stay_in_a_block(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 40 rows read as those of 64; narrow weights leave the least room behind them."""
    shapes = [(1152, 256), (1152, 256), (256, 1152)]  # and one codebook
    shard = on_gpu([[random_matrix(*shape, bits2=2 * bits, seed=3)] * 3 for shape in shapes])
    monkeypatch.setattr(cuda, "_prompt_plan", lambda _: plan_prompt(SHARED["sm_121"], wgmma=False))
    for count in (17, 25, 33, 40, 41, 64, 65, 80, 81):  # rows of each of two experts
        num = 2 * count
        ids = (torch.arange(num, dtype=torch.int32) % 2)[:, None]
        weights, kept = torch.ones(num, 1), torch.ones(num, 1).bool()
        given = (rows_of(num, 1152).cuda(), ids.cuda(), weights.cuda(), kept.cuda())
        found = call(slice(None), given, [shard])
        for rows in (slice(0, 33), slice(num - 33, num)):  # by decode.cu
            assert torch.equal(found[:, rows], call(rows, given, [shard])), count


@pytest.mark.gpu
def test_blocks_of_several_items_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [on_gpu(shard_matrices(640, 384, 12))]
    x, (ids, weights) = rows_of(1500, 640), routing(1500, 4, 12)
    given = (x.cuda(), ids.cuda(), weights.cuda(), torch.ones(1500, 4).bool().cuda())
    usual = call(slice(None), given, shards)
    for blocks in (1, 3, 1000):
        monkeypatch.setattr(cuda, "item_blocks", lambda *_, blocks=blocks: blocks)
        assert torch.equal(call(slice(None), given, shards), usual), blocks


@pytest.mark.gpu
def test_rows_brought_together_by_a_cluster_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [on_gpu(shard_matrices(256, 128, 40))]
    x, (ids, weights) = rows_of(1111, 256), routing(1111, 6, 40)
    ids[7] = -1
    kept = torch.rand(1111, 6, generator=torch.Generator().manual_seed(4)) < 0.8
    given = (x.cuda(), ids.cuda(), weights.cuda(), kept.cuda())
    usual = call(slice(None), given, shards)
    parts = [call(slice(i, i + 101), given, shards) for i in range(0, 1111, 101)]
    assert torch.equal(torch.cat(parts, dim=1), usual)
    for how in (("experts_group", 1), ("experts_group_together", 8)):
        monkeypatch.setattr(cuda, "plan_group", lambda *_, how=how, **__: how)
        for _ in range(5):
            assert torch.equal(call(slice(None), given, shards), usual), how


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (384, 5120, 6),
        (128, 5120, 3),
        (8, 128, 4),
        (6, 256, 3),
        (70, 96, 2),
        (20, 1088, 5),
        (200, 1088, 5),
        (600, 576, 8),
    ],
    ids=str,
)
def test_router_on_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    experts, inputs, k = shape
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(experts, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias, image = 0.1 * torch.randn(2, experts, generator=generator)
    num = 2200 if experts in (200, 384) else 700  # a block for all chunks, or one for each
    x, marks = rows_of(num, inputs), torch.rand(num, generator=generator) < 0.3
    kwargs = {"k": k, "scale": 1.5}
    on = [t.cuda() for t in (x, weight, bias, image, marks)]

    def part(first: int, count: int) -> tuple[Tensor, Tensor]:
        rows = slice(first, first + count)
        return route_rows(
            on[0][rows], on[1], on[2], **kwargs, image_bias_E=on[3], image_T=on[4][rows]
        )

    ids, weights = part(0, num)
    assert bool((ids[:, 1:] > ids[:, :-1]).all()) or k == 1
    for count in (1, 2, 6, 8, 9, 24, 64, 65, 130, 256, 257, 600):
        for first in (0, 77, num - count):
            ids_few, weights_few = part(first, count)
            assert torch.equal(ids_few, ids[first : first + count])
            assert torch.equal(weights_few, weights[first : first + count])
    want, exact = route_rows(
        x.double(), weight.double(), bias, **kwargs, image_bias_E=image, image_T=marks
    )
    same = (ids.cpu() == want).all(dim=1)
    assert same.float().mean() > 0.998  # the rest are near ties
    assert (weights.cpu()[same] - exact[same]).abs().max() < 1e-5


@pytest.mark.gpu
def test_equal_sums_go_to_the_lower_id() -> None:
    weight = torch.zeros(70, 128, dtype=torch.bfloat16, device="cuda")
    ids, weights = route_rows(
        rows_of(3, 128).cuda(), weight, torch.zeros(70, device="cuda"), k=4, scale=1.0
    )
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.equal(weights, torch.full((3, 4), 0.25, device="cuda"))
