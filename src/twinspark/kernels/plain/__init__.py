"""Products with plain weights on CUDA devices, and row-wise kernels without a product.

Read in order: product.py (layout, choice, launches), common.cuh, rows.cu, tiles.cu; then norm.py.
"""
