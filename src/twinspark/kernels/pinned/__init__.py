"""Pinned memory of the host that kernels read and write themselves. Read next: pinned.py."""
