"""The plan link: frames arrive whole, and a broken link is a failed rank."""

import socket
import threading

import pytest

from twinspark.distributed.digest import CHECK_ROUNDS, DigestBook, RunningDigest, is_checked
from twinspark.distributed.frames import Frame, FrameKind
from twinspark.distributed.plan_link import PlanReceiver, PlanSender
from twinspark.errors import FormatError, RankFailed


def connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@pytest.fixture
def link():
    ours, theirs = connected()
    yield PlanSender({1: ours}), PlanReceiver(theirs), ours
    ours.close()
    theirs.close()


def test_frames_arrive_as_they_were_sent(link):
    sender, receiver, _ = link
    big = Frame(kind=FrameKind.STEP, round=7, counts=(1, 2, 3), body=bytes(range(256)) * 8000)
    frames = [Frame(kind=FrameKind.DRAFT), big, Frame(kind=FrameKind.HALT)]
    thread = threading.Thread(target=lambda: [sender.send(frame.pack()) for frame in frames])
    thread.start()
    assert [receiver.receive() for _ in frames] == frames
    thread.join(10)


def test_a_link_that_ends(link):
    sender, receiver, ours = link
    ours.sendall(Frame(kind=FrameKind.HALT).pack()[:9])
    sender.close()
    with pytest.raises(RankFailed, match="rank 0 closed the plan link without a word"):
        receiver.receive()
    receiver.close()
    with pytest.raises(RankFailed, match="the plan link to rank 0 broke"):
        receiver.receive()
    with pytest.raises(RankFailed, match="rank 1 does not take the plan"):
        sender.send(b"x")


def test_garbage_on_the_link(link):
    _, receiver, ours = link
    ours.sendall(b"x" * 64)
    with pytest.raises(FormatError, match="a frame starts with"):
        receiver.receive()


def test_a_blocked_reader_is_woken_by_close(link):
    _, receiver, _ = link
    threading.Timer(0.1, receiver.close).start()
    with pytest.raises(RankFailed):
        receiver.receive()


def test_digests_are_compared_whoever_is_first():
    assert [n for n in range(40) if is_checked(n)] == [CHECK_ROUNDS - 1, 2 * CHECK_ROUNDS - 1]
    book = DigestBook()
    assert book.add_own(15, "a") is None
    assert book.add(1, 15, "a") is None
    assert book.add(1, 31, "b") is None
    problem = book.add_own(31, "c")
    assert problem == (
        "rank 1 fell out of step: after round 31 its digest of plans and logits is b, rank 0 has "
        "c; the two do not compute the same bits"
    )
    assert book.add(2, 31, "b") == problem.replace("rank 1", "rank 2")


def test_the_running_digest_is_xxh3_of_everything():
    digest = RunningDigest()
    assert digest.value() == "2d06800538d394c2"  # of nothing
    digest.update(b"ab")
    digest.update(memoryview(b"c"))
    whole = RunningDigest()
    whole.update(b"abc")
    assert digest.value() == whole.value() == "78af5f94892f3950"


def test_a_last_frame_waits_for_nobody():
    """A rank that is stopped takes nothing; the others still hear the halt."""
    stopped, going = connected(), connected()
    sender = PlanSender({1: stopped[0], 2: going[0]})
    stopped[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            stopped[0].send(bytes(1 << 16))
    stopped[0].setblocking(True)
    sender.send_now(b"halt")
    assert going[1].recv(9) == b"halt"
    sender.close()
    for _, end in (stopped, going):
        end.close()
