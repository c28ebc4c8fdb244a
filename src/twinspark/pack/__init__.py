"""Bytes on disk: names, shapes, checks, slices for a rank. No torch until `weights.py`."""
