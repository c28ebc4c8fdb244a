"""A rank on a GPU dies, stops, differs or fails: both end with 70 in seconds, and say why.

The survivor's GPU waits in a kernel for the other rank meanwhile.
"""

import os
import signal
from time import monotonic

import pytest
from tests.multigpu.pair import DEVICES, ON_GPUS, READY_S, note
from tests.rank_process import is_alive, wait_until

from twinspark import LLM, Sampling
from twinspark.distributed.leaving import EXIT_RANKS
from twinspark.errors import EngineDied, RankFailed

pytestmark = pytest.mark.multigpu


def running(zero, one):
    wait_until(lambda: zero.pieces > 30 or zero.process.poll() is not None, READY_S)
    assert zero.process.poll() is None, zero.said + one.said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_lost_ends_the_other(pairs, victim, how):
    both = pairs()
    running(*both)
    begin = monotonic()
    both[victim].process.send_signal(how)
    code, said = both[1 - victim].end()
    note(f"rank {victim} gets {how.name}: the other has ended", begin)
    assert code == EXIT_RANKS, said
    assert f"rank {victim} is gone" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("mode", "cause"),
    [
        ("raises", "rank 1 failed: RuntimeError: the device is on fire"),
        ("bits", "rank 1 fell out of step: after round "),
    ],
)
def test_a_fault_of_one_rank_ends_both(pairs, mode, cause):
    zero, one = pairs(mode, zero="well")
    code, said = zero.end(READY_S)
    begin = monotonic()
    assert code == EXIT_RANKS and cause in said, said
    code, said = one.end()
    note(f"rank 1 {mode}: it has ended after rank 0", begin)
    assert code == EXIT_RANKS and cause in said, said


@pytest.mark.parametrize(
    ("mode", "difference"),
    [("slots", "setting slots is 2, rank 0 has 3"), ("version", "version is 0.0.1, rank")],
)
def test_ranks_that_differ_do_not_start(pairs, mode, difference):
    for rank in pairs(mode, zero="well"):
        code, said = rank.end(READY_S)
        assert code == EXIT_RANKS, said
        assert f"rank 1 cannot join: its {difference}" in said


@pytest.mark.skipif(not ON_GPUS, reason="CPUs are shared")
def test_one_card_for_two_ranks_is_refused(pairs):
    for rank in pairs(devices=(DEVICES[0], DEVICES[0])):
        code, said = rank.end(READY_S)
        assert code == EXIT_RANKS, said
        assert "both on the GPU" in said


@pytest.mark.filterwarnings("default")  # torch has one for a group that nobody destroyed
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_library_user_gets_an_error_and_goes_on(how):
    """The rank was started here; this process's GPU is let go, and runs another model after."""
    device = DEVICES[0]
    settings = {"slots": 2, "max_context_tokens": 4096, "page_tokens": 16, "device": device}
    endless = Sampling(max_tokens=4000, ignore_eos=True, seed=3)
    llm = LLM.demo(ranks=2, **settings)
    pid = llm._loaded.team.local_pids[1]
    stream = llm.stream("The capital of France is", endless)
    for _ in range(10):
        next(stream)
    begin = monotonic()
    os.kill(pid, how)
    cause = "its process was killed by SIGKILL" if how == signal.SIGKILL else "stopped answering"
    with pytest.raises(RankFailed, match=f"rank 1 is gone: .*{cause}"):
        for _ in stream:
            pass
    note(f"rank 1 of a library user gets {how.name}: the error is there", begin)
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(EngineDied):
        llm.generate("ab")
    llm.close()
    with LLM.demo(**settings) as alone:
        assert len(alone.generate("ab", Sampling(max_tokens=2, ignore_eos=True)).token_ids) == 2
