"""The Triton body of the trellis search, without a GPU: it compiles for both targets, and its
forward pass under the interpreter gives the costs of the plain recursion."""

import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

TARGETS = (90, 121)  # H200 and GB10


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("bits", [2, 4])
def test_compiles(capability, bits):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from twinspark.quantize.trellis_triton import _forward_kernel, _trace_kernel

    constants = {"BITS": bits, "EDGES": 1 << (16 - bits)}
    pointers = {"targets": "*fp32", "table": "*fp16", "costs": "*fp32"}
    forward = {**pointers, "first": "i32"}
    trace = {
        **pointers, "ends": "*i32", "states": "*i32", "edges": "*i32", "first": "i32",
        "stop": "i32",
    }  # fmt: skip
    for kernel, signature, more in (
        (_forward_kernel, forward, {"BLOCK": 2048}),
        (_trace_kernel, trace, {}),
    ):
        fixed = {**constants, **more}
        options = {"enable_fp_fusion": True}
        source = ASTSource(kernel, signature | dict.fromkeys(fixed, "constexpr"), constexprs=fixed)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"][:4] == b"\x7fELF"


INTERPRETED = """
import torch
from twinspark.kernels.exl3 import Codebook, codebook_table
from twinspark.quantize.trellis_triton import _forward_kernel

bits, edges = 2, 1 << 14
targets = torch.randn(1, 256, generator=torch.Generator().manual_seed(5))
table = codebook_table(Codebook.MUL1, torch.device("cpu"))
costs = torch.zeros(1, 257, edges)
_forward_kernel[(1,)](targets, table, costs, 128, BITS=bits, EDGES=edges, BLOCK=edges)
expected = torch.zeros(1, edges)
states = (torch.arange(1 << bits)[:, None] << (16 - bits)) | torch.arange(edges)
for t in range(256):
    step = table[states].float() - targets[:, None, None, (128 + t) % 256]
    expected = (expected[:, states >> bits] + step * step).amin(1)
    assert torch.equal(costs[:, t + 1], expected), t
"""


def test_interpreted_costs_are_those_of_the_recursion():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
