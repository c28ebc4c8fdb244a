"""Rank 0's hold on the other ranks: they are sent every plan, and must compute the same bits.

Implements `runner.Followers` over a team. Read next: `wire.py`, `follower.py`,
`distributed/team.py`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from twinspark.distributed.digest import RunningDigest, is_checked
from twinspark.distributed.fate import RankMemory
from twinspark.distributed.frames import Frame
from twinspark.engine.plan import StepPlan
from twinspark.engine.wire import encode_draft, encode_step
from twinspark.model.step import DraftRequest

Found = npt.NDArray[Any]
"""What a rank computed for a plan, see `runner.Followers.check`."""

STALE_S = 2.0
"""What a rank said about its memory longer ago than this is no longer known."""


class LeadsRanks(Protocol):
    """What is needed of a team; `distributed.team.LeadingTeam` is the one that counts."""

    @property
    def memory(self) -> list[RankMemory]:
        """What every rank last said about its memory."""

    def check(self) -> None:
        """See that no rank has failed so far."""

    def send(self, frame: Frame) -> bytes:
        """Send a frame to every other rank; its bytes."""

    def compare(self, number: int, digest: str) -> None:
        """Compare this rank's digest of a round with the others'."""


class RankLeader:
    """The other ranks, as the runner of rank 0 knows them."""

    compares = True
    chooses = True

    def __init__(self, team: LeadsRanks) -> None:
        """Take a team whose ranks have all loaded."""
        self._team = team
        self._digest = RunningDigest()
        self._round = 0

    def step(self, plan: StepPlan) -> None:
        """Have them run a plan.

        Raises:
            RankFailed: a rank is gone.
        """
        self._round = plan.round
        self._digest.update(self._team.send(encode_step(plan)))

    def draft(self, requests: Sequence[DraftRequest]) -> None:
        """Have them run a draft pass.

        Raises:
            RankFailed: a rank is gone.
        """
        self._digest.update(self._team.send(encode_draft(requests)))

    def check(self, found: Found) -> None:
        """Take what this rank computed into the digest, and compare it now and then.

        Raises:
            RankFailed: a rank computed other bits, or is gone: a GPU that waited for it was let go
                with whatever it had.
        """
        self._team.check()
        self._digest.update(found.tobytes())
        if is_checked(self._round):
            self._team.compare(self._round, self._digest.value())


class RanksMemory:
    """Implements `memory.MemoryMeter` for all ranks of a team."""

    def __init__(self, team: LeadsRanks) -> None:
        """Read what the team's ranks say."""
        self._team = team

    def usable(self) -> Sequence[int | None]:
        """Bytes by rank; None where it is not known or the figure is too old."""
        return [told.usable_bytes if told.age_s <= STALE_S else None for told in self._team.memory]
