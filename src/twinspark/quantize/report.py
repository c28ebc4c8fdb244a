"""What quantizing cost: per matrix and for a pack. No tensors are kept here.

Read next: matrix.py, pipeline.py.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MatrixReport:
    """One quantized matrix.

    Attributes:
        name: module name.
        inputs: K.
        outputs: N.
        bits: bits a weight.
        proxy_error: tr(E^T H E) / tr(W^T H W) on the calibration Hessian, undamped; the weight
            error where there was none.
        weight_nmse: |E|^2 / |W|^2. Says little about outputs.
        seconds: its share of the batch's time.
    """

    name: str
    inputs: int
    outputs: int
    bits: int
    proxy_error: float
    weight_nmse: float
    seconds: float


def summarize(reports: Iterable[MatrixReport]) -> dict[str, Any]:
    """Totals, and one entry a matrix, ready for JSON."""
    found = list(reports)
    weights = sum(r.inputs * r.outputs for r in found)
    bits = sum(r.inputs * r.outputs * r.bits for r in found)
    return {
        "matrices": len(found),
        "weights": weights,
        "average_bits": bits / weights if weights else 0.0,
        "seconds": sum(r.seconds for r in found),
        "worst_proxy_error": max((r.proxy_error for r in found), default=0.0),
        "by_matrix": [asdict(r) for r in found],
    }
