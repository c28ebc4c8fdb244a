"""Garbage collection of processes that serve: what they loaded is left out of it.

A full collection looks at every object there is, and libraries and the model alone are 50,000 (the
server) to 200,000 (the engine): tens of milliseconds in which no token moves. Nothing is imported
from the package here.
"""

import gc


def spare_what_is_loaded() -> None:
    """Take all objects there are now out of garbage collection. Call it once, when loaded.

    They are still freed as soon as nothing refers to them, unless they refer to each other.
    """
    gc.collect()
    gc.freeze()
