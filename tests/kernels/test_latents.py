"""What attention takes of x in one op: torch body against the ops alone; on a GPU their bits."""

from collections.abc import Sequence

import pytest
import torch
from tests.kernels.exl3_data import random_matrix
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cache_rows import RowSource, window_rows
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.exl3 import prepare_exl3
from twinspark.kernels.exl3.choose import exl3_product
from twinspark.kernels.exl3.cuda import prepare_exl3_cuda
from twinspark.kernels.latents import Latents, LatentWeights, latents
from twinspark.kernels.latents.latents import cuda_variants
from twinspark.kernels.plain.norm import rms_norm_rows
from twinspark.kernels.rms_norm import rms_norm

EPS = 1e-20
SIZES = [  # inputs, rank, width of a window row, rotated pairs, outputs of further matrices
    (5120, 1280, 512, 32, (512, 512)),
    (1152, 2176, 256, 16, (128,)),
    (512, 128, 128, 8, ()),
]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_of(
    inputs: int, rank: int, width: int, others: Sequence[int], device: str = "cpu"
) -> LatentWeights:
    # seeds a multiple of three apart have one codebook
    made = [
        random_matrix(inputs, n, bits2=10, seed=3 * i).to(torch.device(device))
        for i, n in enumerate((rank, width, *others))
    ]
    prepare = prepare_exl3 if device == "cpu" else prepare_exl3_cuda
    queries, window, *rest = (prepare(matrix) for matrix in made)
    norms = [(1 + 0.1 * torch.randn(n, generator=draw(n))).to(device) for n in (rank, width)]
    return LatentWeights(queries, window, tuple(rest), *norms, EPS)


def rows_of(count: int, inputs: int) -> Tensor:
    """Rows of very different sizes."""
    scale = torch.exp(2 * torch.randn(count, 1, generator=draw(1)))
    return (scale * torch.randn(count, inputs, generator=draw(2))).bfloat16()


def angles_of(count: int, pairs: int) -> tuple[Tensor, Tensor]:
    angles = 6.3 * torch.rand(count, pairs, generator=draw(3))
    return angles.cos(), angles.sin()


def ring_of(packed: bool, width: int, device: str = "cpu") -> RowSource:
    if not packed:
        return RowSource("plain", torch.zeros(80, width, dtype=torch.bfloat16, device=device))
    values = torch.zeros(80, width, dtype=torch.uint8, device=device)
    return RowSource(
        "window", values, torch.zeros(80, width // 32, dtype=torch.uint8, device=device)
    )


def targets_of(count: int) -> Tensor:
    targets = torch.randperm(80, generator=draw(4))[:count].int()
    targets[2::3] = -1
    return targets


def each_alone(
    x: Tensor, w: LatentWeights, angles: tuple[Tensor, Tensor], ring: RowSource, to: Tensor
) -> Latents:
    window = window_rows(
        exl3_product(x, w.window), w.window_norm_H, *angles, eps=EPS, store=ring, targets_T=to
    )
    queries = rms_norm_rows(exl3_product(x, w.queries), w.query_norm_R, eps=EPS)
    others = [exl3_product(x, matrix, out_dtype=torch.float32) for matrix in w.others]
    return Latents(queries, window, tuple(others))


def same(found: Latents, wanted: Latents) -> bool:
    assert found.window_TH is not None and wanted.window_TH is not None
    pairs = zip(found.others, wanted.others, strict=True)
    return (
        torch.equal(found.queries_TR, wanted.queries_TR)
        and torch.equal(found.window_TH, wanted.window_TH)
        and all(torch.equal(one, other) for one, other in pairs)
    )


def same_rings(one: RowSource, other: RowSource) -> bool:
    if one.scales is not None and other.scales is not None:
        if not torch.equal(one.scales, other.scales):
            return False
    return torch.equal(one.values, other.values) and bool(one.values.any())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("width", [128, 256, 512])
def test_it_compiles(width: int, arch: str) -> None:
    for source, defines in cuda_variants(width, width // 16):
        assert b"latents_finish" in compile_cubin(source, arch=arch, defines=defines)


@pytest.mark.parametrize("packed", [False, True])
def test_one_op_is_its_parts(packed: bool) -> None:
    weights, x, angles = weights_of(256, 384, 128, (128,)), rows_of(7, 256), angles_of(7, 16)
    ring, other = ring_of(packed, 128), ring_of(packed, 128)
    wanted = each_alone(x, weights, angles, other, targets_of(7))
    found = latents(x, weights, *angles, store=ring, targets_T=targets_of(7))
    assert same(found, wanted) and same_rings(ring, other)
    raw = exl3_product(x, weights.queries)
    assert torch.equal(found.queries_TR, rms_norm(raw, weights.query_norm_R, eps=EPS))
    short = latents(x, weights, *angles, keep_window=False)
    assert short.window_TH is None and torch.equal(short.queries_TR, found.queries_TR)
    for row in range(7):
        cut = slice(row, row + 1)
        alone = latents(x[cut], weights, *(angle[cut] for angle in angles))
        assert torch.equal(alone.queries_TR, found.queries_TR[cut])


def test_what_does_not_fit_is_told() -> None:
    weights, x, angles = weights_of(256, 128, 128, ()), rows_of(2, 256), angles_of(2, 16)
    with pytest.raises(KernelUnsupported, match="not packed on a CUDA device"):
        latents(x, weights, *angles, backend="cuda")
    with pytest.raises(KernelUnsupported, match="1 to 64 bfloat16 rows"):
        latents(x.double(), weights, *angles, backend="cuda")
    with pytest.raises(ValueError, match="come together"):
        latents(x, weights, *angles, store=ring_of(False, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_have_the_bits_of_the_ops_alone(sizes, packed: bool) -> None:
    inputs, rank, width, pairs, others = sizes
    weights = weights_of(inputs, rank, width, others, "cuda")
    for rows in (*range(1, 25), 33, 64):
        x = rows_of(rows, inputs).cuda()
        cos, sin = (angle.cuda() for angle in angles_of(rows, pairs))
        ring, other = ring_of(packed, width, "cuda"), ring_of(packed, width, "cuda")
        to = targets_of(rows).cuda()
        wanted = each_alone(x, weights, (cos, sin), other, to)
        found = latents(x, weights, cos, sin, store=ring, targets_T=to, backend="cuda")
        assert same(found, wanted) and same_rings(ring, other), rows
        again = ring_of(packed, width, "cuda")
        found = latents(x, weights, cos, sin, store=again, targets_T=to, keep_window=False)
        assert found.window_TH is None and same_rings(again, other)
        assert torch.equal(found.queries_TR, wanted.queries_TR)
        loose = latents(x, weights, cos, sin)  # into no ring
        assert same(loose, wanted)


@pytest.mark.gpu
def test_captured_equals_eager() -> None:
    inputs, rank, width, pairs, others = SIZES[0]
    weights = weights_of(inputs, rank, width, others, "cuda")
    for rows in (1, 6, 24):
        x = rows_of(rows, inputs).cuda()
        cos, sin = (angle.cuda() for angle in angles_of(rows, pairs))
        ring, other = ring_of(True, width, "cuda"), ring_of(True, width, "cuda")
        to = targets_of(rows).cuda()
        wanted = latents(x, weights, cos, sin, store=other, targets_T=to)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = latents(x, weights, cos, sin, store=ring, targets_T=to)
        for out in (found.queries_TR, found.window_TH, *found.others, ring.values, ring.scales):
            out.zero_()
        graph.replay()
        assert same(found, wanted) and same_rings(ring, other)


@pytest.mark.gpu
def test_more_rows_and_other_kinds_take_the_ops_alone() -> None:
    weights = weights_of(512, 128, 128, (), "cuda")
    x, angles = rows_of(70, 512).cuda(), [angle.cuda() for angle in angles_of(70, 8)]
    with pytest.raises(KernelUnsupported, match="1 to 64"):
        latents(x, weights, *angles, backend="cuda")
    few = latents(x[:64], weights, *(angle[:64] for angle in angles), backend="cuda")
    assert torch.equal(latents(x, weights, *angles).queries_TR[:64], few.queries_TR)
