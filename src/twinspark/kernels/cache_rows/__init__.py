"""Rows on their way into the caches: norm, rotation, rounding and storing in one launch.

Read in order: source.py, rows.py.
"""

from twinspark.kernels.cache_rows.rows import (
    key_rows,
    latent_rows,
    pool_rows,
    window_rows,
)
from twinspark.kernels.cache_rows.source import RowSource

__all__ = [
    "RowSource",
    "key_rows",
    "latent_rows",
    "pool_rows",
    "window_rows",
]
