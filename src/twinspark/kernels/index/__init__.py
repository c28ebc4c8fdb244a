"""The index search over pages of keys: queries, scores, choice; torch reference and CUDA body.

Owns `select_entries`; where keys lie is the cache's business, weights are the model's. Read in
order: pages.py, select.py, reference.py, cuda.py.
"""

from twinspark.kernels.index.pages import KeyPages, Selected, Wanted
from twinspark.kernels.index.select import select_entries

__all__ = ["KeyPages", "Selected", "Wanted", "select_entries"]
