"""A forward pass that may stand between two layers while other slots go on.

All that it needs later is held here, and belongs to its own slots in the caches: what runs between
two of its layers may read and write any other slot. Read next: `transformer.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinspark.cache.view import Caches
from twinspark.model.indexer import CallState
from twinspark.model.rows import Rows
from twinspark.model.streams import Streams, Taps

EngramRows = Callable[[int, Rows], Tensor]
"""(Engram layer, rows) -> their table rows side by side."""


@dataclass(kw_only=True)
class PartialPass:
    """Rows on their way through the layers.

    Attributes:
        rows: those that still go on.
        streams: theirs.
        taps: what the draft blocks will read.
        engram_rows: reads Engram rows when their layer comes.
        caches: written in place.
        wanted: rows of the step whose logits are wanted.
        call: scratch that layers share.
        next_layer: the first layer that has not been run.
        is_over: no layer is left to run, or no row.
    """

    rows: Rows
    streams: Streams
    taps: Taps
    engram_rows: EngramRows
    caches: Caches
    wanted: Sequence[int] = ()
    call: CallState = field(default_factory=CallState)
    next_layer: int = 0
    is_over: bool = False

    @torch.inference_mode()
    def drop(self, slot: int) -> None:
        """Leave a slot's rows out from now on: they write nothing more.

        The others go on as they were, since no row depends on which ones share its pass.
        """
        self.taps.drop(slot)
        kept = self.rows.without(slot)
        places = self.rows.places_of(kept)
        if places is not None:
            self.streams = self.streams.narrow(places)
            self.call.narrow(places, kept)
            self.rows = kept
