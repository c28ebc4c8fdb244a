"""What must be seen when a rank dies, stops, differs or fails, on CPUs and on GPUs alike."""

import os
import signal
from time import monotonic

import pytest
from tests.rank_process import is_alive, wait_until

from twinspark import Sampling
from twinspark.distributed.leaving import EXIT_RANKS
from twinspark.errors import EngineDied, RankFailed

SOON_S = 3.0
"""The promise."""
ENDLESS = Sampling(max_tokens=4000, ignore_eos=True, seed=3)
FAULTS = {
    "raises": "rank 1 failed: RuntimeError: the device is on fire",
    "bits": "rank 1 fell out of step: after round ",
}
"""What a rank's child is told to do, and the cause that all ranks name."""

kill_or_stop = pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"]
)
each_fault = pytest.mark.parametrize(("mode", "cause"), FAULTS.items(), ids=FAULTS)


def running(zero, one, pieces, timeout_s):
    """Wait until both are amid their rounds."""
    wait_until(lambda: zero.pieces > pieces or zero.process.poll() is not None, timeout_s)
    assert zero.process.poll() is None, zero.said + one.said


def ended(rank, cause, timeout_s=60):
    """What a rank said that ends with the others for this cause."""
    code, said = rank.end(timeout_s)
    assert code == EXIT_RANKS and cause in said, said
    return said


def refused(ranks, difference, timeout_s=60):
    """Ranks that differ do not start, and both name what differs, with both values."""
    for rank in ranks:
        assert "Traceback" not in ended(rank, f"rank 1 cannot join: its {difference}", timeout_s)


def lose_rank_1(llm, stream, how, in_time):
    """A library user whose rank 1 was started here gets an error, and it is seen off.

    Args:
        llm: on two ranks; closed.
        stream: of it, begun and endless.
        how: the signal that rank 1 gets.
        in_time: called with the moment of that, once the error is there.
    """
    pid = llm._loaded.team.local_pids[1]
    begin = monotonic()
    os.kill(pid, how)
    cause = "its process was killed by SIGKILL" if how == signal.SIGKILL else "stopped answering"
    with pytest.raises(RankFailed, match=f"rank 1 is gone: .*{cause}"):
        for _ in stream:
            pass
    in_time(begin)
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(EngineDied):
        llm.generate("ab")
    llm.close()
