"""The fate link: who is gone, why, and who is told."""

import socket
import threading
from time import monotonic

import pytest

from twinspark.distributed import fate as fate_module
from twinspark.distributed.fate import Fate
from twinspark.distributed.notes import pack_note

LONG_S = 30.0


class Side:
    """One rank's fate, and what it reported."""

    def __init__(self, rank, links, *, timeout_s=LONG_S, usable=5, how_ended=lambda _rank: None):
        self.failures, self.notes = [], []
        self.failed, self.noted = threading.Event(), threading.Event()
        self.fate = Fate(
            rank,
            links,
            timeout_s=timeout_s,
            usable_bytes=lambda: usable,
            on_failure=self._fail,
            on_note=self._note,
            how_ended=how_ended,
        )
        self.fate.be_strict()

    def _fail(self, failure):
        self.failures.append(str(failure))
        self.failed.set()

    def _note(self, rank, note):
        self.notes.append((rank, note))
        self.noted.set()


@pytest.fixture
def team(monkeypatch):
    """Rank 0 and two others, linked as a star; fates are not started."""
    monkeypatch.setattr(fate_module, "BEAT_S", 0.05)
    sides = []

    def make(**rules):
        pairs = [socket.socketpair() for _ in range(2)]
        sides.append(Side(0, {1: pairs[0][0], 2: pairs[1][0]}, **rules))
        sides.extend(Side(n + 1, {0: pairs[n][1]}, usable=7 + n, **rules) for n in range(2))
        return sides

    yield make
    for side in sides:
        side.fate.close()


def start(*sides):
    for side in sides:
        side.fate.start()


def test_a_closed_link_ends_all_and_is_named_once(team):
    zero, one, two = team()
    start(zero, one, two)
    one.fate.close()
    assert zero.failed.wait(5) and two.failed.wait(5)
    assert zero.failures == ["rank 1 is gone: its connection closed without a word; it was killed "
                             "or fell"]  # fmt: skip
    assert two.failures == zero.failures and not one.failures
    assert zero.fate.wait_failure(0) is zero.fate.failure


def test_how_a_process_ended_is_told_where_it_is_known(team):
    zero, one, two = team(how_ended=lambda rank: f"process {rank} was killed by SIGKILL")
    start(zero, one, two)
    one.fate.close()
    assert zero.failed.wait(5)
    assert zero.failures == ["rank 1 is gone: process 1 was killed by SIGKILL"]


def test_silence_is_death_within_the_limit(team):
    zero, one, two = team(timeout_s=0.4)
    begin = monotonic()
    start(zero, two)  # rank 1 is connected and says nothing
    assert zero.failed.wait(5)
    assert 0.35 < monotonic() - begin < 2
    assert "rank 1 is gone: it stopped answering 0.4 s ago" in zero.failures[0]
    assert two.failed.wait(5) and not one.failures


def test_silence_while_loading_is_not_death(team, monkeypatch):
    zero, one, two = team(timeout_s=0.2)
    zero.fate._silence_s = fate_module.LOADING_SILENCE_S
    start(zero, two)
    assert not zero.failed.wait(0.6)
    zero.fate.be_strict()
    assert zero.failed.wait(5)


def test_a_follower_that_loses_rank_0_says_so(team):
    zero, one, two = team(timeout_s=0.4)
    start(one)
    assert one.failed.wait(5)
    assert one.failures[0].startswith("rank 1 ended, because rank 0 is gone for it: it stopped")
    start(zero)  # it was only asleep, and finds the reason
    assert zero.failed.wait(5)
    assert zero.failures == one.failures


def test_a_rank_can_say_why_it_fails(team):
    zero, one, two = team()
    start(zero, one, two)
    one.fate.fail("rank 1 failed: RuntimeError: no luck")
    one.fate.fail("something later")
    for side in (zero, one, two):
        assert side.failed.wait(5)
        assert side.failures == ["rank 1 failed: RuntimeError: no luck"]


def test_a_halt_is_no_failure(team):
    zero, one, two = team()
    start(zero, one, two)
    zero.fate.halt()
    assert one.noted.wait(5) and two.noted.wait(5)
    assert one.fate.has_halted
    one.fate.close()
    two.fate.close()
    zero.fate.wait_ended(5)
    assert str(zero.fate.fail("too late")) == "too late"
    assert not (zero.failures or one.failures or two.failures)


def test_a_process_that_slept_does_not_blame_the_others(team, monkeypatch):
    """After a stop of this process all peers look silent; they get their chance to answer."""
    zero, one, two = team(timeout_s=0.5)
    real, slept = fate_module.readable, []

    def sleepy(links, timeout_s):
        if not slept and threading.current_thread() is zero.fate._thread:
            slept.append(True)
            threading.Event().wait(fate_module.OVERSLEPT_S + timeout_s + 0.1)
            return []
        return real(links, timeout_s)

    one.fate._silence_s = two.fate._silence_s = LONG_S
    start(one, two)
    with monkeypatch.context() as patch:
        patch.setattr(fate_module, "readable", sleepy)
        start(zero)
        threading.Event().wait(1.5)
    assert slept and not zero.failures


def test_memory_is_told_with_every_beat(team):
    zero, one, two = team()
    start(zero, one, two)
    until = monotonic() + 5
    while monotonic() < until:
        told = zero.fate.memory()
        if [told[rank].usable_bytes for rank in (1, 2)] == [7, 8]:
            break
    assert [told[rank].usable_bytes for rank in (1, 2)] == [7, 8]
    assert all(memory.age_s < 5 for memory in told.values())


def test_nonsense_is_a_failure(team):
    zero, one, two = team()
    start(zero, two)
    one.fate._peers[0].link.sendall(b"\x03\x00\x00\x00abc")
    assert zero.failed.wait(5)
    assert "rank 1 is gone: it sent nonsense: a note is not JSON" in zero.failures[0]


def test_a_note_without_its_fields_is_a_failure_too(team):
    zero, one, two = team()
    zero.fate._on_note = lambda rank, note: note["round"]
    start(zero, two)
    one.fate.send({"type": "digest"})
    assert zero.failed.wait(5)
    assert "rank 1 is gone: it sent nonsense: 'round'" in zero.failures[0]


def test_notes_of_others_are_handed_on(team):
    zero, one, two = team()
    start(zero, one)
    one.fate.send({"type": "digest", "round": 15})
    assert zero.noted.wait(5)
    assert zero.notes == [(1, {"type": "digest", "round": 15})]


def test_a_note_may_come_in_pieces(team):
    zero, one, two = team()
    start(zero)
    data = pack_note({"type": "loaded"}) * 2
    for n in range(0, len(data), 3):
        one.fate._peers[0].link.sendall(data[n : n + 3])
    until = monotonic() + 5
    while len(zero.notes) < 2 and monotonic() < until:
        threading.Event().wait(0.01)
    assert zero.notes == [(1, {"type": "loaded"})] * 2
