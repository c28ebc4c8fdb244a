"""The forward pass, one concept a file. Read `transformer.py` first.

Tensor names end in shape letters; a letter means one thing everywhere: T tokens (rows) of the call,
D hidden size, C residual streams, N query heads, H head size, K selected entries, L entries of a
slot, E experts, A active experts, R low rank, V vocabulary, I expert intermediate size, G wo_a
groups, W window, B rows of a cache table. See docs/concepts/shapes.md.
"""
