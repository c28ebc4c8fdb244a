"""Attention of each query over its own list of cached rows, read where they lie.

Read in order: attend.py, reference.py, cuda.py.
"""

from twinspark.kernels.attention.attend import attend_rows
from twinspark.kernels.cache_rows.source import RowSource

__all__ = ["RowSource", "attend_rows"]
