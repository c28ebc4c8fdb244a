"""A rank fails while the main thread is stuck: every open request is answered before the end."""

import socket

import pytest

from twinspark.engine import host
from twinspark.engine.host import Inbox, LastWords, Outbox
from twinspark.errors import RankFailed
from twinspark.messages import Cancel, Failed, Finished, FrameReader, GenerateRequest, ReplyStats


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch):
    ours, theirs = socket.socketpair()

    def leave(message):
        raise Left(message)

    monkeypatch.setattr(host, "leave", leave)
    monkeypatch.setattr(host, "EXIT_GRACE_S", 0.01)
    inbox, outbox = Inbox(theirs), Outbox(theirs)
    requests = [GenerateRequest(request_id=name, prompt_ids=(1,)) for name in "abc"]
    outbox.expect([*requests, Cancel(request_id="a")])
    yield inbox, outbox, ours
    ours.close()
    theirs.close()


def events(ours):
    ours.settimeout(0.2)
    try:
        return FrameReader().feed(ours.recv(1 << 16))
    except TimeoutError:
        return []


FAILURE = RankFailed("rank 1 is gone: it stopped answering 2.5 s ago")


def test_a_stuck_main_thread_does_not_leave_requests_open(ends):
    inbox, outbox, ours = ends
    stats = ReplyStats(prompt_tokens=1, completion_tokens=1)
    outbox.send(Finished(request_id="b", reason="stop", stats=stats))
    events(ours)
    with pytest.raises(Left, match="rank 1 is gone"):
        LastWords(inbox, outbox)(FAILURE)
    assert events(ours) == [
        Failed(request_id=name, kind="engine", message=str(FAILURE), code="engine_ended")
        for name in "ac"
    ]


def test_a_main_thread_that_ends_by_itself_has_the_word(ends):
    inbox, outbox, ours = ends
    inbox.finished.set()
    with pytest.raises(Left):
        LastWords(inbox, outbox)(FAILURE)
    assert events(ours) == []


def test_a_main_thread_that_is_stuck_in_writing_does_not_hold_the_end_up(ends):
    inbox, outbox, ours = ends
    with outbox._lock, pytest.raises(Left):
        LastWords(inbox, outbox)(FAILURE)
    ours.close()
    with pytest.raises(Left):  # nobody reads any more
        LastWords(inbox, outbox)(FAILURE)
