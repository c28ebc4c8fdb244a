"""The Engram gate and table rows on CUDA devices; hashing is in `kernels/engram.py`.

Read in order: gate.py, gate.cu.
"""

from twinspark.kernels.engram_gate.gate import dequant_rows, gate_rows

__all__ = ["dequant_rows", "gate_rows"]
