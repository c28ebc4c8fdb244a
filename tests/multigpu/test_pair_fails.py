"""A rank on a GPU dies, stops, differs or fails: both end with 70 in seconds, and say why.

The survivor's GPU waits in a kernel for the other rank meanwhile.
"""

from functools import partial
from time import monotonic

import pytest
from tests.lost_ranks import (
    ENDLESS,
    each_fault,
    ended,
    kill_or_stop,
    lose_rank_1,
    refused,
    running,
)
from tests.multigpu.pair import DEVICES, ON_GPUS, READY_S, note

from twinspark import LLM, Sampling

pytestmark = pytest.mark.multigpu


@kill_or_stop
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_lost_ends_the_other(pairs, victim, how):
    both = pairs()
    running(*both, 30, READY_S)
    begin = monotonic()
    both[victim].process.send_signal(how)
    said = ended(both[1 - victim], f"rank {victim} is gone")
    note(f"rank {victim} gets {how.name}: the other has ended", begin)
    assert "Traceback" not in said


@each_fault
def test_a_fault_of_one_rank_ends_both(pairs, mode, cause):
    zero, one = pairs(mode, zero="well")
    ended(zero, cause, READY_S)
    begin = monotonic()
    ended(one, cause)
    note(f"rank 1 {mode}: it has ended after rank 0", begin)


@pytest.mark.parametrize(
    ("mode", "difference"),
    [("slots", "setting slots is 2, rank 0 has 3"), ("version", "version is 0.0.1, rank")],
)
def test_ranks_that_differ_do_not_start(pairs, mode, difference):
    refused(pairs(mode, zero="well"), difference, READY_S)


@pytest.mark.skipif(not ON_GPUS, reason="CPUs are shared")
def test_one_card_for_two_ranks_is_refused(pairs):
    for rank in pairs(devices=(DEVICES[0], DEVICES[0])):
        ended(rank, "both on the GPU", READY_S)


@pytest.mark.filterwarnings("default")  # torch has one for a group that nobody destroyed
@kill_or_stop
def test_a_library_user_gets_an_error_and_goes_on(how):
    """This process's GPU is let go, and runs another model after."""
    settings = {"slots": 2, "max_context_tokens": 4096, "page_tokens": 16, "device": DEVICES[0]}
    llm = LLM.demo(ranks=2, **settings)
    stream = llm.stream("The capital of France is", ENDLESS)
    for _ in range(10):
        next(stream)
    what = f"rank 1 of a library user gets {how.name}: the error is there"
    lose_rank_1(llm, stream, how, partial(note, what))
    with LLM.demo(**settings) as alone:
        assert len(alone.generate("ab", Sampling(max_tokens=2, ignore_eos=True)).token_ids) == 2
