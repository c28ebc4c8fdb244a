"""The Engram gate and table rows on CUDA devices: plain bodies, compiled code, every bit."""

import pytest
import torch
from torch import Tensor

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.dequant import dequant_engram
from twinspark.kernels.engram import engram_gate
from twinspark.kernels.engram_gate import dequant_rows, gate_rows
from twinspark.kernels.engram_gate.gate import cuda_variants, why_not_gate

EPS = 1e-20


def inputs(num: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(num, 4, width, generator=generator).bfloat16()
    kv = torch.randn(num, 5 * width, generator=generator).bfloat16()
    qk = 1 + torch.randn(4, width, generator=generator) * 0.1
    return x, kv, qk, torch.arange(num) % 4 == 1


def exact(x: Tensor, kv: Tensor, qk: Tensor, blocked: Tensor | None) -> Tensor:
    num, streams, width = x.shape
    key = kv[:, : streams * width].reshape(num, streams, width)
    value = kv[:, streams * width :].contiguous()
    return engram_gate(x.double(), key.double(), value.double(), qk.double(), blocked, eps=EPS)


def bytes_of(num: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num)
    rows = torch.randint(0, 256, (num, width), dtype=torch.uint8, generator=generator)
    rows[(rows & 127) == 127] = 1  # no NaN
    scale = torch.randint(100, 150, (num, width // 32), dtype=torch.uint8, generator=generator)
    return rows, scale


def test_plain_bodies() -> None:
    x, kv, qk, blocked = inputs(9, 128)
    want = exact(x, kv, qk, blocked)
    assert ((gate_rows(x, kv, qk, blocked, eps=EPS).double() - want).abs() <= 0.02).all()
    assert torch.equal(gate_rows(x.double(), kv.double(), qk, blocked, eps=EPS), want)
    rows, scale = bytes_of(5, 64)
    assert torch.equal(dequant_rows(rows, scale), dequant_engram(rows, scale))
    with pytest.raises(ValueError, match="keys and values must be"):
        gate_rows(x, kv[:, :-1], qk, eps=EPS)


def test_why_not() -> None:
    assert "bfloat16 streams" in str(why_not_gate(torch.zeros(1, 4, 128)))
    x = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    assert "4 streams" in str(why_not_gate(x))
    assert "CUDA device" in str(why_not_gate(torch.zeros(1, 4, 128, dtype=torch.bfloat16)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("hidden", [128, 256, 5120])
def test_gate_compiles(hidden: int, arch: str) -> None:
    for source, defines in cuda_variants(hidden):
        cubin = compile_cubin(source, arch=arch, defines=defines)
        assert b"engram_gate" in cubin and b"engram_dequant" in cubin


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 256, 384, 5120])
def test_gate_against_float64(width: int) -> None:
    x, kv, qk, blocked = inputs(300, width)
    want = exact(x, kv, qk, blocked)
    on_gpu = [t.cuda() for t in (x, kv, qk, blocked)]
    got = gate_rows(*on_gpu, eps=EPS)
    # a half of a bf16 step, and what fp32 makes of the gate
    assert ((got.cpu().double() - want).abs() <= 2**-8 * want.abs() + 2e-5).all()
    assert torch.equal(got[1], on_gpu[0][1]), "a blocked row takes nothing in"
    xs, kvs, _, marks = on_gpu
    for first, count in ((0, 1), (7, 6), (100, 64)):
        rows = slice(first, first + count)
        part = gate_rows(xs[rows], kvs[rows], on_gpu[2], marks[rows], eps=EPS)
        assert torch.equal(part, got[rows])
    free = gate_rows(xs, kvs, on_gpu[2], eps=EPS)
    assert torch.equal(free[0], got[0]) and not torch.equal(free[1], got[1])
    dirty = xs.clone()
    dirty[2] = float("nan")
    assert torch.equal(gate_rows(dirty, kvs, on_gpu[2], marks, eps=EPS)[3:], got[3:])


@pytest.mark.gpu
def test_captured_gate_equals_eager() -> None:
    x, kv, qk, _ = (t.cuda() for t in inputs(24, 5120))
    eager = gate_rows(x, kv, qk, eps=EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [gate_rows(x, kv, qk, eps=EPS) for _ in range(3)]
    for _ in range(10):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, eager) for out in outs)


@pytest.mark.gpu
def test_rows_from_bytes() -> None:
    rows, scale = bytes_of(144, 256)
    want = dequant_engram(rows, scale)
    assert torch.equal(dequant_rows(rows.cuda(), scale.cuda()).cpu(), want)
    together = torch.cat([rows, scale], dim=1).cuda()  # as rows stored with their scales
    assert torch.equal(dequant_rows(together[:, :256], together[:, 256:]).cpu(), want)
    every = torch.arange(256, dtype=torch.uint8).view(8, 32)
    for code in (0, 1, 127, 254, 255):
        codes = torch.full((8, 1), code, dtype=torch.uint8)
        got = dequant_rows(every.cuda(), codes.cuda()).cpu()
        assert torch.equal(got.isnan(), dequant_engram(every, codes).isnan())
        assert torch.equal(got.nan_to_num(), dequant_engram(every, codes).nan_to_num())
    assert dequant_rows(rows[:0].cuda(), scale[:0].cuda()).shape == (0, 256)
