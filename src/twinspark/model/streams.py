"""The residual streams on their way through the layers (model specification 3.1, 3.2).

A sublayer's output is not added at once: the boundary before the next sublayer adds it, mixes and
norms in one go (`kernels/residual`). Letters: T rows, C streams, D hidden, S shards.
Read next: `layer.py`, `kernels/residual/boundary.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from twinspark.distributed.collectives import Collectives, sum_shards
from twinspark.kernels.residual import Boundary, Ran, Site, boundary
from twinspark.model.rows import Rows


class Streams(NamedTuple):
    """Streams between two sublayers.

    Attributes:
        x_TCD: the streams, [T, C, D].
        pre_TC: the last site's pre, which the next collapse uses; None is stream 0 alone (3.2).
        ran: the sublayer that has run since x was written, or None.
    """

    x_TCD: Tensor
    pre_TC: Tensor | None = None
    ran: Ran | None = None

    def narrow(self, places: Tensor) -> "Streams":
        """The rows at `places`."""
        ran = self.ran
        if ran is not None:
            y = ran.y[places] if ran.y.dim() == 2 else ran.y[:, places]
            ran = Ran(y, ran.post_TC[places], ran.comb_TCC[places])
        pre_TC = None if self.pre_TC is None else self.pre_TC[places]
        return Streams(self.x_TCD[places], pre_TC, ran)

    def enter(
        self,
        norm_D: Tensor | None,
        site: Site | None = None,
        *,
        eps: float,
        bf16_T: Tensor | None = None,
        tap_TD: Tensor | None = None,
        keep_collapsed: bool = False,
    ) -> Boundary:
        """Everything between the last sublayer and the next; arguments as in `boundary`."""
        return boundary(
            self.x_TCD,
            norm_eps=eps,
            ran=self.ran,
            site=site,
            pre_TC=self.pre_TC,
            norm_D=norm_D,
            bf16_T=bf16_T,
            tap_TD=tap_TD,
            keep_collapsed=keep_collapsed,
        )

    def settled(self, *, eps: float) -> "Streams":
        """With the last sublayer's output added."""
        if self.ran is None:
            return self
        return Streams(self.enter(None, eps=eps).streams_TCD, self.pre_TC)


def outputs_of(partials_STD: Tensor, group: Collectives, dtype: torch.dtype) -> Tensor:
    """A sublayer's output for `Ran`: [T, D], or on CUDA [S, T, D] for the boundary to add up."""
    if not partials_STD.is_cuda:
        return sum_shards(partials_STD.unbind(0), group, dtype)
    if group.size == 1:
        return partials_STD
    return group.gather_stack(partials_STD.to(dtype))


class Taps:
    """Stream means entering the tap layers, side by side (5.1)."""

    def __init__(self, num: int) -> None:
        """For `num` taps."""
        self._num = num
        self._found: list[tuple[Rows, Tensor]] = []
        self._wide: Tensor | None = None
        self._dropped: list[int] = []  # slots whose rows are not wanted any more

    @property
    def is_complete(self) -> bool:
        """Whether all have been taken."""
        return len(self._found) == self._num

    @property
    def rows(self) -> Rows:
        """The rows that reached the last tap."""
        rows = self._found[-1][0]
        for slot in self._dropped:
            rows = rows.without(slot)
        return rows

    def drop(self, slot: int) -> None:
        """Leave a slot's rows out of what is joined."""
        self._dropped.append(slot)

    def place(self, rows: Rows, like: Tensor) -> Tensor:
        """Where the next tap goes, [T, D]; `like` are the streams."""
        if self._wide is None:
            self._wide = like.new_empty(len(rows), self._num * like.shape[2])
        part = self._wide[:, len(self._found) * like.shape[2] :][:, : like.shape[2]]
        if len(rows) != len(self._wide):
            part = like.new_empty(len(rows), like.shape[2])
        self._found.append((rows, part))
        return part

    def joined(self) -> Tensor:
        """[T, taps * D], for the rows that reached the last tap."""
        assert self._wide is not None
        kept = self.rows
        if len(kept) == len(self._wide):
            return self._wide
        parts = []
        for rows, tap_TD in self._found:
            places = rows.places_of(kept)
            parts.append(tap_TD if places is None else tap_TD[places])
        return torch.cat(parts, dim=1)
