"""Sums over two GPUs of one host without a library, see `one_shot.py`. Measured by a bench only."""
