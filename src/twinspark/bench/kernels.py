"""Kernels on a GPU, cell by cell: the EXL3 product at the shapes of one rank of two (K1, K1p).

Times are of graph replays over rotating weights, several times the cache, by device events; each
cell is checked against float64 and against single rows, bit for bit, before it is timed. Read next:
`kernels/exl3/cuda.py`.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from twinspark.bench.graphs import capture_calls, time_in_turn
from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.compile import compiler_version
from twinspark.kernels.cuda.launch import peak_clock_mhz, why_not_launch
from twinspark.kernels.exl3 import Codebook, Exl3Matrix, decode_matrix, hadamard128
from twinspark.kernels.exl3.cuda import CudaExl3, exl3_rows, prepare_exl3_cuda

SHAPES = (
    (5120, 1792, 5),
    (1280, 16384, 5),
    (4096, 1024, 5),
    (4096, 5120, 5),
    (1280, 4096, 5),
    (5120, 1152, 2),
    (5120, 1152, 3),
    (5120, 1152, 4),
    (5120, 1152, 5),
    (1152, 5120, 3),
    (5120, 2304, 3),
    (2304, 5120, 3),
    (6144, 25600, 5),
    (15360, 5120, 5),
    (5120, 64640, 6),
)
"""Inputs, outputs and bits of the matrices, one rank of two."""

DECODE_ROWS = (1, 2, 4, 6, 8, 16, 24)
PROMPT_ROWS = (64, 512, 2048, 4096)
_MOST_PROMPT_OUTPUTS = 30000  # the head is not part of a prompt
_COLD_BYTES = 300 << 20  # of weights in rotation; the cache of an H200 has 60 MB
_REPEATS = 9
_CHECKED_ROWS = 64
_READ_BYTES_PER_US = 4.3e6  # H200, measured
_DECODED_PER_US = 4.15e6
_FLOPS_PER_US = 790e6
_RAMP_US = 1.5
_MOST_ERROR = 4e-4  # one fp16 rounding of the rotated input


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured product.

    Attributes:
        inputs: K.
        outputs: N.
        bits: bits a weight.
        rows: M.
        us: median time of one product.
        spread_us: largest minus smallest of the repeats.
        bf16_us: the same of a dense bf16 product of the library, alternating with ours.
        packed_bytes: trellis bytes read.
        weights: weights decoded, at least once.
        flops: twice the multiply-adds.
        limit_us: what an H200 needs for the bytes, the decoding or the matrix work, and a ramp.
        share: limit over time.
        error: of the result against float64, relative root mean square.
    """

    inputs: int
    outputs: int
    bits: int
    rows: int
    us: float
    spread_us: float
    bf16_us: float
    packed_bytes: int
    weights: int
    flops: int
    limit_us: float
    share: float
    error: float


def limit_us(inputs: int, outputs: int, bits: int, rows: int) -> float:
    """The time no kernel of this kind can beat on an H200, with the ramp of a launch."""
    weights = inputs * outputs
    read = weights * bits / 8 / _READ_BYTES_PER_US
    matrix = 2 * rows * weights / _FLOPS_PER_US
    return max(read, weights / _DECODED_PER_US, matrix) + _RAMP_US


def device_facts() -> dict[str, str | int]:
    """What the figures of this process were measured with.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
    """
    if not torch.cuda.is_available():
        raise KernelUnsupported("kernels are measured on a CUDA device; torch finds none here")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = why_not_launch(device)
    if reason is not None:
        raise KernelUnsupported(f"kernels cannot be measured: {reason}")
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "compiler": ".".join(map(str, compiler_version())),
        "clock_mhz": peak_clock_mhz(torch.cuda.current_device()),
    }


def measure_products(
    shapes: Iterable[tuple[int, int, int]] = SHAPES,
    rows: Iterable[int] = DECODE_ROWS + PROMPT_ROWS,
    *,
    cache_dir: Path | None = None,
) -> Iterator[Cell]:
    """Measure the EXL3 product on the current device, one cell at a time.

    Args:
        shapes: inputs, outputs, bits.
        rows: row counts of each.
        cache_dir: where compiled kernels are kept, or None.

    Raises:
        KernelUnsupported: there is no device these kernels run on.
        RuntimeError: a result is wrong, or its bits depend on the number of rows.
    """
    device_facts()
    rows = tuple(rows)
    for inputs, outputs, bits in shapes:
        bench = _Bench(inputs, outputs, bits, cache_dir)
        for num in rows:
            if num < _CHECKED_ROWS or outputs <= _MOST_PROMPT_OUTPUTS:
                yield bench.measure(num)


class _Bench:
    """Weights of one shape, ours and dense, in as many copies as keep the cache cold."""

    def __init__(self, inputs: int, outputs: int, bits: int, cache_dir: Path | None) -> None:
        self.inputs, self.outputs, self.bits = inputs, outputs, bits
        self._generator = torch.Generator("cuda").manual_seed(inputs + outputs + bits)
        words = (inputs // 16, outputs // 16, 16 * bits)
        size = inputs * outputs * bits // 8
        suh, svh = self._scales(inputs) / inputs**0.5, self._scales(outputs)
        matrices = [
            Exl3Matrix(self._words(words), suh.half(), svh.half(), Codebook.MUL1)
            for _ in range(max(3, min(128, _COLD_BYTES // size)))
        ]
        self.products = [prepare_exl3_cuda(m, cache_dir=cache_dir) for m in matrices]
        self.dense = [
            torch.randn(inputs, outputs, device="cuda", generator=self._generator).bfloat16()
            for _ in range(max(2, min(64, _COLD_BYTES // (2 * inputs * outputs))))
        ]
        self._exact = _exact(matrices[0], self._rows(_CHECKED_ROWS))

    def measure(self, rows: int) -> Cell:
        """Check, then time."""
        x = self._rows(max(rows, _CHECKED_ROWS))[:rows]
        out = torch.full((rows, self.outputs), float("nan"), device="cuda")
        error = self._check(x, out)
        ours = capture_calls([partial(_product, x, p, out) for p in self.products])
        theirs = capture_calls([partial(torch.mm, x, w) for w in self.dense])
        graphs = [(ours, len(self.products)), (theirs, len(self.dense))]
        times, dense_times = time_in_turn(graphs, repeats=_REPEATS)
        us, limit = statistics.median(times), limit_us(self.inputs, self.outputs, self.bits, rows)
        return Cell(
            inputs=self.inputs,
            outputs=self.outputs,
            bits=self.bits,
            rows=rows,
            us=round(us, 2),
            spread_us=round(max(times) - min(times), 2),
            bf16_us=round(statistics.median(dense_times), 2),
            packed_bytes=self.inputs * self.outputs * self.bits // 8,
            weights=self.inputs * self.outputs,
            flops=2 * rows * self.inputs * self.outputs,
            limit_us=round(limit, 2),
            share=round(limit / us, 3),
            error=error,
        )

    def _check(self, x: Tensor, out: Tensor) -> float:
        num = min(len(x), _CHECKED_ROWS)
        _product(x, self.products[0], out)
        if not out.isfinite().all():
            raise RuntimeError("the product left outputs unwritten, or made them infinite")
        exact = self._exact[:num]
        error = float((out[:num].double() - exact).norm() / exact.norm())
        if error > _MOST_ERROR:
            raise RuntimeError(f"the product is wrong: relative error {error:.2e}")
        for i in (0, num // 2, num - 1):
            alone = exl3_rows(x[i : i + 1], self.products[0], out_dtype=torch.float32)
            if not torch.equal(alone[0], out[i]):
                raise RuntimeError(f"row {i} of {len(x)} has other bits than alone")
        return error

    def _rows(self, num: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(self.inputs)
        first = torch.randn(_CHECKED_ROWS, self.inputs, device="cuda", generator=generator)
        more = torch.randn(num - _CHECKED_ROWS, self.inputs, device="cuda", generator=generator)
        return torch.cat([first, more]).bfloat16()

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(
            -32768, 32768, shape, dtype=torch.int16, device="cuda", generator=self._generator
        )

    def _scales(self, num: int) -> Tensor:
        size = 0.7 + 0.6 * torch.rand(num, device="cuda", generator=self._generator)
        return size * torch.randn(num, device="cuda", generator=self._generator).sign()


def _product(x: Tensor, prepared: CudaExl3, out: Tensor) -> Tensor:
    return exl3_rows(x, prepared, out=out, out_dtype=torch.float32)


def _exact(matrix: Exl3Matrix, x: Tensor) -> Tensor:
    rotated = hadamard128(x.double() * matrix.suh.double())
    weight = decode_matrix(matrix.trellis, matrix.codebook)
    parts = [rotated @ part.double() for part in torch.split(weight, 8192, dim=1)]
    return hadamard128(torch.cat(parts, dim=1)) * matrix.svh.double()
