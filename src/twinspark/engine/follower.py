"""A rank that follows: it loads its part of the model, then runs what rank 0 sends.

It decides nothing and reads no clock: every plan and draft pass comes over the plan link, and goes
through the same `Runner` as on rank 0. Read next: `ranks.py` (how it joins), `runner.py`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from twinspark.distributed.digest import RunningDigest, is_checked
from twinspark.distributed.frames import Frame, FrameKind
from twinspark.engine.leader import Found
from twinspark.engine.plan import StepPlan
from twinspark.engine.runner import Runner
from twinspark.engine.wire import decode_draft, decode_step
from twinspark.model.step import DraftRequest

logger = logging.getLogger(__name__)


class Obeys:
    """What a following rank's runner reports to: the running digest, and nobody else."""

    compares = True
    chooses = False

    def __init__(self, send_digest: Callable[[int, str], None]) -> None:
        """`send_digest` is told the digest of every round that is compared."""
        self._send_digest = send_digest
        self._digest = RunningDigest()
        self._round = 0

    def hear(self, frame: Frame) -> None:
        """Take a frame into the digest."""
        self._digest.update(frame.pack())
        if frame.kind == FrameKind.STEP:
            self._round = frame.round

    def step(self, plan: StepPlan) -> None:
        """Nobody is below this rank."""

    def draft(self, requests: Sequence[DraftRequest]) -> None:
        """Nobody is below this rank."""

    def check(self, found: Found) -> None:
        """Take what this rank computed into the digest."""
        self._digest.update(found.tobytes())
        if is_checked(self._round):
            self._send_digest(self._round, self._digest.value())


class PlanSource(Protocol):
    """Where frames come from; `distributed.plan_link.PlanReceiver` is the one that counts."""

    def receive(self) -> Frame:
        """Wait for the next frame."""


def obey(plans: PlanSource, runner: Runner, follows: Obeys) -> None:
    """Run what rank 0 sends until it halts.

    Args:
        plans: the plan link.
        runner: this rank's, made with `follows`.
        follows: keeps the digest.

    Raises:
        RankFailed: rank 0 is gone.
        FormatError: a frame holds nothing that can be run.
    """
    while True:
        frame = plans.receive()
        follows.hear(frame)
        match frame.kind:
            case FrameKind.STEP:
                runner.run(decode_step(frame))
            case FrameKind.DRAFT:
                runner.draft(decode_draft(frame), None)
            case FrameKind.HALT:
                return
