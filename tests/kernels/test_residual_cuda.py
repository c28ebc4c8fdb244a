"""The residual boundary: plain body by parts; the CUDA body compiles, and on a GPU every bit."""

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.rows import assert_rows_stand_alone
from torch import Tensor

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.cuda.launch import num_processors, shared_bytes
from twinspark.kernels.hyper_connections import HyperMix, collapse, expand, mix, mix_torch
from twinspark.kernels.matmul import prepare_matrix
from twinspark.kernels.residual import Boundary, Ran, boundary, cuda, prepare_site
from twinspark.kernels.residual.cuda import (
    MIX_SOURCE,
    ROWS_SOURCE,
    STREAMS_SOURCE,
    TILES_SOURCE,
    RowsPlan,
    cuda_variants,
    lanes_of,
    plan_rows,
    plan_tiles,
    why_not_boundary,
)
from twinspark.kernels.residual.site import MOST_SHARDS
from twinspark.kernels.rms_norm import rms_norm

EPS = 1e-20
SITE = {"iters": 20, "eps": 1e-6}


class Case:
    """A site and rows that reach it."""

    def __init__(
        self,
        num: int,
        width: int = 128,
        *,
        shards: int = 0,
        y_dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        streams: int = 4,
    ) -> None:
        self.generator = torch.Generator().manual_seed(7)
        values = (2 + streams) * streams
        self.fn = self._randn(values, streams * width) * 0.6 / width**0.5
        self.scale = torch.tensor([0.7, 1.3, 2.0])
        self.base = self._randn(values) * 0.5
        self.x = (self._randn(num, streams, width) * 2).bfloat16()
        shape = (num, width) if shards == 0 else (shards, num, width)
        self.y = self._randn(*shape).to(y_dtype)
        self.pre = torch.sigmoid(self._randn(num, streams))
        self.post = torch.sigmoid(self._randn(num, streams)) * 2
        self.comb = torch.softmax(self._randn(num, streams, streams), dim=1).contiguous()
        self.norm = 1 + self._randn(width) * 0.1
        self.marks = torch.arange(num) % 3 == 1
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.site = prepare_site(self.fn, self.scale, self.base, **SITE)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def ran(self) -> Ran:
        return Ran(self.y, self.post, self.comb)

    def run(self, rows: slice | Tensor = slice(None), *, marks: bool = False) -> Boundary:
        y = self.y[:, rows] if self.y.dim() == 3 else self.y[rows]
        return boundary(
            self.x[rows].contiguous(),
            norm_eps=EPS,
            ran=Ran(y.contiguous(), self.post[rows], self.comb[rows]),
            site=self.site,
            pre_TC=self.pre[rows],
            norm_D=self.norm,
            bf16_T=self.marks[rows] if marks else None,
            keep_collapsed=True,
        )


def tensors(left: Boundary) -> Iterator[tuple[str, Tensor]]:
    named = (("streams", left.streams_TCD), ("x", left.x_TD), ("collapsed", left.collapsed_TD))
    yield from ((name, tensor) for name, tensor in named if tensor is not None)
    if left.mix is not None:
        yield from zip(("pre", "post", "comb"), left.mix, strict=True)


# ---- the plain body


def test_plain_body_is_its_parts() -> None:
    case = Case(9)
    left = case.run(marks=True)
    streams = expand(case.y, case.x, case.post, case.comb)
    assert torch.equal(left.streams_TCD, streams)
    fn = prepare_matrix(case.fn)
    rounded = prepare_matrix(case.fn.bfloat16().float())
    want = mix(
        streams, fn, case.scale, case.base, norm_eps=EPS, other=(rounded, case.marks), **SITE
    )
    assert left.mix is not None
    assert all(torch.equal(a, b) for a, b in zip(left.mix, want, strict=True))
    collapsed = collapse(streams, case.pre)
    assert left.collapsed_TD is not None and torch.equal(left.collapsed_TD, collapsed)
    assert left.x_TD is not None
    assert torch.equal(left.x_TD, rms_norm(collapsed, case.norm, eps=EPS))


def test_plain_body_leaves_out_what_is_not_asked_for() -> None:
    case = Case(5)
    left = boundary(case.x, norm_eps=EPS, norm_D=case.norm)
    assert left.streams_TCD is case.x and left.mix is None and left.collapsed_TD is None
    assert left.x_TD is not None
    assert torch.equal(left.x_TD, rms_norm(case.x[:, 0].contiguous(), case.norm, eps=EPS))
    tap = torch.zeros(5, 256, dtype=torch.bfloat16)
    left = boundary(case.x, norm_eps=EPS, ran=case.ran, tap_TD=tap[:, 128:])
    assert left.x_TD is None
    mean = left.streams_TCD.float().sum(1) / 4
    torch.testing.assert_close(tap[:, 128:].float(), mean, rtol=2**-8, atol=1e-6)
    assert not tap[:, :128].any()


def test_plain_body_sums_shards_as_they_travel() -> None:
    case = Case(6, shards=3, y_dtype=torch.float32)
    total = case.y[0].bfloat16().float()
    for part in case.y[1:]:
        total = total + part.bfloat16().float()
    whole = boundary(
        case.x, norm_eps=EPS, ran=Ran(total.bfloat16(), case.post, case.comb), norm_D=case.norm
    )
    parts = boundary(case.x, norm_eps=EPS, ran=case.ran, norm_D=case.norm)
    assert torch.equal(whole.streams_TCD, parts.streams_TCD)
    zeros = torch.zeros(MOST_SHARDS, *case.y.shape[1:])  # more than a kernel adds
    ran = case.ran._replace(y=torch.cat([case.y, zeros]))
    assert torch.equal(boundary(case.x, norm_eps=EPS, ran=ran).streams_TCD, parts.streams_TCD)


def test_plain_body_rows_stand_alone() -> None:
    case = Case(40)

    def op(x: Tensor, y: Tensor, pre: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor, ...]:
        left = boundary(
            x,
            norm_eps=EPS,
            ran=Ran(y, post, comb),
            site=case.site,
            pre_TC=pre,
            norm_D=case.norm,
        )
        return tuple(tensor for _, tensor in tensors(left))

    assert_rows_stand_alone(op, case.x, case.y, case.pre, case.post, case.comb)


def test_float64_and_other_stream_counts_take_the_plain_body() -> None:
    case = Case(3, streams=2)
    left = case.run()
    assert left.mix is not None and left.mix.comb_TCC.shape == (3, 2, 2)
    wide = prepare_site(case.fn, case.scale, case.base, dtype=torch.float64, **SITE)
    left = boundary(case.x.double(), norm_eps=EPS, site=wide)
    assert left.mix is not None and left.mix.pre_TC.dtype == torch.float64
    assert wide.num_bytes == 2 * 256 * 16 * 8 + 8 * 4 + 3 * 4


def test_wrong_calls_are_told() -> None:
    case = Case(4)
    with pytest.raises(ValueError, match="pre must be"):
        boundary(case.x, norm_eps=EPS, pre_TC=case.pre[:3])
    with pytest.raises(ValueError, match="contiguous"):
        boundary(case.x[:, :, ::2], norm_eps=EPS)
    with pytest.raises(ValueError, match="the output must be"):
        boundary(case.x, norm_eps=EPS, ran=Ran(case.y[:2], case.post, case.comb))


def test_why_not() -> None:
    cpu = torch.device("cpu")
    assert "4 residual streams" in str(why_not_boundary(cpu, 2, 256))
    assert "multiples of 128" in str(why_not_boundary(cpu, 4, 200))
    assert "CUDA device" in str(why_not_boundary(cpu, 4, 5120))


# ---- layouts, plans and compiled code, without a GPU


def test_lanes_of_weights() -> None:
    hidden = 256
    fn = torch.arange(24.0 * 4 * hidden).view(24, 4 * hidden)
    lanes = lanes_of(fn).view(hidden // 32, 4, 3, 2, 8, 4, 4)
    for group, stream, part, half, g, q in [
        (0, 0, 0, 0, 0, 0),
        (7, 3, 2, 1, 6, 3),
        (3, 1, 1, 0, 5, 2),
    ]:
        first = stream * hidden + 32 * group + 8 * q + 4 * half
        assert torch.equal(
            lanes[group, stream, part, half, g, q], fn[8 * part + g, first : first + 4]
        )
    assert torch.equal(lanes.flatten().sort().values, fn.flatten())


@pytest.mark.parametrize("shared", [232448, 101376])
def test_plans_fit(shared: int) -> None:
    for hidden in (128, 256, 5120, 8192):
        for shards, wide in ((0, False), (1, False), (2, False), (2, True), (MOST_SHARDS, True)):
            plan = plan_rows(4096, hidden, shards, wide, 132, shared)
            together = plan.blocks // 132
            assert plan.blocks == 132 * together
            assert together == 1 or together * -(-hidden // 256) * 32 <= 640
            assert together * (plan.stages * plan.stage_bytes + 5 * 1024) <= shared
            assert plan.stages >= (shared > 200 << 10 or hidden < 8192 and not shards)
        tiles = plan_tiles(4096, hidden, 132, shared)
        assert tiles.stages >= 2
        assert tiles.stages * 16 * 4 * 256 * 2 + 26 * 1024 <= shared
        columns, ways, _ = tiles.grid
        assert columns == -(-hidden // 256) and columns * ways <= 132 < columns * (ways + 1)
    assert plan_rows(133, 5120, 1, False, 132, shared).blocks == 132
    assert plan_rows(200, 128, 1, False, 132, shared).blocks == 200
    assert plan_rows(132, 5120, 1, False, 132, shared).stages == 0
    assert plan_rows(4096, 5120, MOST_SHARDS, True, 132, 101376).stages == 0
    assert plan_tiles(70, 128, 132, shared).grid == (1, 5, 1)
    assert plan_tiles(4096, 5120, 8, shared).grid == (20, 1, 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("hidden", [128, 5120])
def test_boundary_compiles(hidden: int, arch: str) -> None:
    shared = {"sm_90a": 232448, "sm_121": 101376}[arch]
    variants = list(cuda_variants(hidden, 2, shared))
    names = {
        MIX_SOURCE: (b"boundary_mix",),
        STREAMS_SOURCE: (b"boundary_streams",),
        ROWS_SOURCE: (b"boundary_rows",),
        TILES_SOURCE: (b"mix_tiles", b"mix_finish"),
    }
    assert {path for path, _ in variants} == names.keys()
    for source, defines in variants:
        cubin = compile_cubin(source, arch=arch, defines=defines)
        assert all(name in cubin for name in names[source])


# ---- on a GPU

WIDTHS = [384, 5120]  # with a half pair of columns, and the release's


def exact_parts(case: Case, left: Boundary, marks: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each result beside its float64 value, from the results before it."""
    y = case.y if case.y.dim() == 3 else case.y[None]
    total = y[0].bfloat16().float()
    for part in y[1:]:
        total = total + part.bfloat16().float()
    total = total.bfloat16().double()
    old = torch.einsum("tij,tid->tjd", case.comb.double(), case.x.double())
    yield "streams", left.streams_TCD, case.post.double()[:, :, None] * total[:, None] + old
    streams = left.streams_TCD.double()
    assert left.collapsed_TD is not None and left.x_TD is not None and left.mix is not None
    yield "collapsed", left.collapsed_TD, (case.pre.double()[..., None] * streams).sum(1)
    c = left.collapsed_TD.double()
    yield "x", left.x_TD, c * c.square().mean(1, keepdim=True).rsqrt() * case.norm.double()
    v = streams.flatten(1)
    m = v @ case.fn.double().T
    if marks:
        m = torch.where(case.marks[:, None], v @ case.fn.bfloat16().double().T, m)
    m = m * v.square().mean(1, keepdim=True).rsqrt()
    want = mix_torch(m, case.scale.double(), case.base.double(), **SITE)
    yield from zip(HyperMix._fields, left.mix, want, strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("num", [1, 6, 24, 64, 65, 300])
@pytest.mark.parametrize("width", WIDTHS)
def test_against_float64(width: int, num: int, marks: bool) -> None:
    case = Case(num, width, device="cuda")
    for name, got, want in exact_parts(case, case.run(marks=marks), marks):
        rounding = 2**-8 * want.abs() + 1e-6 if got.dtype == torch.bfloat16 else 1e-6
        assert ((got.double() - want).abs() <= rounding).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("num", [6, 100])
@pytest.mark.parametrize(("shards", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_shards_against_float64(shards: int, dtype: torch.dtype, num: int) -> None:
    case = Case(num, 5120, shards=shards, y_dtype=dtype, device="cuda")
    for name, got, want in exact_parts(case, case.run(), marks=False):
        rounding = 2**-8 * want.abs() + 1e-6 if got.dtype == torch.bfloat16 else 1e-6
        assert ((got.double() - want).abs() <= rounding).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_do_not_depend_on_the_call_or_the_kernel(width: int) -> None:
    case = Case(400, width, shards=2, device="cuda")
    whole = dict(tensors(case.run(marks=True)))
    order = torch.randperm(400, generator=case.generator).cuda()
    calls: list[slice | Tensor] = [order, *(slice(i, i + 1) for i in (0, 3, 399))]
    calls += [slice(5, 11), slice(100, 124), slice(1, 64), slice(336, 400), slice(0, 65)]
    for rows in calls:
        for name, tensor in tensors(case.run(rows, marks=True)):
            assert torch.equal(tensor, whole[name][rows]), (name, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [6, 100])
def test_parts_have_the_bits_of_the_whole(num: int) -> None:
    case = Case(num, 5120, device="cuda")
    whole = dict(tensors(case.run()))
    tap = torch.full((num, 3 * 5120), float("nan"), dtype=torch.bfloat16, device="cuda")
    first = boundary(case.x, norm_eps=EPS, ran=case.ran, tap_TD=tap[:, 5120:10240])
    streams = first.streams_TCD
    assert torch.equal(streams, whole["streams"])
    want = (streams[:, 0].float() + streams[:, 1].float()) + streams[:, 2].float()
    want = ((want + streams[:, 3].float()) / 4).bfloat16()
    assert torch.equal(tap[:, 5120:10240], want)
    assert tap[:, :5120].isnan().all() and tap[:, 10240:].isnan().all()
    mixed = boundary(streams, norm_eps=EPS, site=case.site).mix
    assert mixed is not None
    for name, tensor in zip(("pre", "post", "comb"), mixed, strict=True):
        assert torch.equal(tensor, whole[name])
    last = boundary(streams, norm_eps=EPS, pre_TC=case.pre, norm_D=case.norm)
    assert last.x_TD is not None and torch.equal(last.x_TD, whole["x"])
    one_hot = torch.tensor([1.0, 0, 0, 0], device="cuda").expand(num, -1).contiguous()
    a = boundary(streams, norm_eps=EPS, norm_D=case.norm).x_TD
    b = boundary(streams, norm_eps=EPS, pre_TC=one_hot, norm_D=case.norm).x_TD
    assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 24, 64, 300, 1500])
def test_captured_equals_eager(num: int) -> None:
    case = Case(num, 5120, device="cuda")
    eager = dict(tensors(case.run()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = [case.run() for _ in range(3)]
    for _ in range(20):
        for left in calls:
            for _, tensor in tensors(left):
                tensor.fill_(float("nan"))
        graph.replay()
        for left in calls:
            for name, tensor in tensors(left):
                assert torch.equal(tensor, eager[name]), name
    assert case.site.counters is not None and not case.site.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num", [250, 900])
def test_one_block_for_many_rows_or_one_a_row(
    num: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(num, width, shards=2, device="cuda")
    processors, shared = num_processors(0), shared_bytes(0)
    assert plan_rows(num, width, 2, False, processors, shared).stages
    many = dict(tensors(case.run(marks=True)))
    monkeypatch.setattr(cuda, "plan_rows", lambda *_: RowsPlan(0, 0, 0))  # as where none fits
    one = dict(tensors(case.run(marks=True)))
    for name, tensor in many.items():
        assert torch.equal(tensor, one[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("num", [8, 80])
def test_neighbors_with_nan_change_nothing(num: int) -> None:
    case = Case(num, 384, device="cuda")
    clean = dict(tensors(case.run()))
    case.x[2], case.y[5] = float("nan"), float("inf")
    kept = [i for i in range(num) if i not in (2, 5)]
    for name, tensor in tensors(case.run()):
        assert torch.equal(tensor[kept], clean[name][kept]), name


@pytest.mark.gpu
def test_no_rows() -> None:
    case = Case(4, 384, device="cuda")
    left = case.run(slice(0, 0))
    assert all(len(tensor) == 0 for _, tensor in tensors(left))
    assert case.site.num_bytes == 4 * (case.fn.numel() + 24 + 3)
