"""The join: every way it can go wrong has its own message, on both sides (case R89)."""

import socket
import threading
from contextlib import suppress
from time import monotonic

import pytest

from twinspark.distributed import join
from twinspark.distributed.join import GREETING, gather_ranks, join_rank0, listen, parse_address
from twinspark.distributed.notes import receive_note, send_note
from twinspark.distributed.plan_link import close_socket
from twinspark.errors import ConfigError, RankFailed

TRAITS = {"version": "1", "pack digest": "abc", "setting slots": "4"}


class Meeting:
    """Rank 0 in the test's thread, others in their own."""

    def __init__(self):
        self.listener = listen("127.0.0.1", 0)
        self.address = self.listener.getsockname()
        self.results, self.threads, self.waits = {}, [], []

    def join(self, rank, *, size=2, name=None, **changes):
        def run():
            try:
                traits = TRAITS | {key.replace("_", " "): v for key, v in changes.items()}
                self.results[name or rank] = join_rank0(self.address, rank, size, traits, limit_s=5)
            except (RankFailed, ConfigError) as error:
                self.results[name or rank] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def lead(self, *, size=2, limit_s=5.0, check=lambda: None, on_wait=None):
        with self.listener:
            return gather_ranks(
                self.listener,
                size,
                TRAITS,
                store=("127.0.0.1", 4),
                limit_s=limit_s,
                on_wait=on_wait or (lambda what, part: self.waits.append((what, part))),
                check=check,
            )

    def end(self):
        for thread in self.threads:
            thread.join(10)
        return self.results


@pytest.fixture
def meeting(monkeypatch):
    monkeypatch.setattr(join, "ACCEPT_S", 0.02)
    monkeypatch.setattr(join, "HELLO_S", 2.0)
    monkeypatch.setattr(join, "RETRY_S", 0.02)
    found = Meeting()
    yield found
    found.listener.close()
    for result in found.end().values():
        if isinstance(result, join.Links):
            for link in (*result.fate.values(), *result.plan.values()):
                close_socket(link)


def close(links):
    for link in (*links.fate.values(), *links.plan.values()):
        close_socket(link)


def test_all_ranks_meet(meeting):
    for rank in (3, 1, 2):
        meeting.join(rank, size=4)
    links = meeting.lead(size=4)
    found = meeting.end()
    assert sorted(links.fate) == sorted(links.plan) == [1, 2, 3]
    for rank in (1, 2, 3):
        assert found[rank].store == ("127.0.0.1", 4)
        for kind in ("fate", "plan"):  # each rank got its own links
            getattr(links, kind)[rank].sendall(f"{kind}{rank}".encode())
            assert getattr(found[rank], kind)[0].recv(9) == f"{kind}{rank}".encode()
    assert meeting.waits[0][0].startswith("waiting for rank 1, 2, 3 at 127.0.0.1:")
    close(links)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "2"}, "its version is 2, rank 0 has 1"),
        ({"pack_digest": "xyz"}, "its pack digest is xyz, rank 0 has abc"),
        ({"setting_slots": "8"}, "its setting slots is 8, rank 0 has 4"),
        ({"setting_new": "8"}, "its setting new is 8, rank 0 has unknown"),
        ({"size": 4}, "rank 1 was started as one of 4 ranks, rank 0 as one of 2"),
    ],
)
def test_a_difference_is_named_with_both_values(meeting, changes, message):
    meeting.join(1, **changes)
    with pytest.raises(RankFailed, match=message):
        meeting.lead()
    assert message in str(meeting.end()[1])


def test_other_ranks_hear_of_a_difference_too(meeting):
    meeting.join(1, size=4)
    meeting.join(3, size=4)

    def on_wait(what, _part):
        if what.startswith("waiting for rank 2 at") and len(meeting.threads) < 3:
            meeting.join(2, size=4, version="0")

    with pytest.raises(RankFailed):
        meeting.lead(size=4, limit_s=30, on_wait=on_wait)
    found = meeting.end()
    for rank in (1, 2, 3):
        assert "rank 2 cannot join: its version is 0, rank 0 has 1" in str(found[rank])


def test_numbers_must_differ_and_fit(meeting):
    meeting.join(1, size=4, name="first")

    def on_wait(_what, _part):
        if len(meeting.threads) == 1 and "first" not in meeting.results:
            meeting.join(1, size=4, name="second")
        elif len(meeting.results) == 1 and len(meeting.threads) == 2:
            meeting.join(9, size=4, name="ninth")

    with pytest.raises(RankFailed, match="a rank 9 came, expected 1 to 3"):
        meeting.lead(size=4, on_wait=on_wait)
    found = meeting.end()
    refused = {str(found["first"]), str(found["second"])}
    assert any("rank 1 has joined already" in text for text in refused)


def test_rank_0_waits_no_longer_than_the_limit(meeting):
    with pytest.raises(RankFailed, match="rank 1 did not join within 0.2 s; start it with --rank"):
        meeting.lead(limit_s=0.2)
    assert meeting.waits[-1][1] == 1.0


def test_a_child_that_ended_is_not_waited_for(meeting):
    def check():
        raise RankFailed("rank 1 is gone before it joined")

    with pytest.raises(RankFailed, match="gone before it joined"):
        meeting.lead(check=check)


def test_a_rank_waits_no_longer_than_the_limit(meeting):
    meeting.listener.close()
    with pytest.raises(RankFailed, match="rank 0 did not answer at .* within 0.1 s .*refused"):
        join_rank0(meeting.address, 1, 2, TRAITS, limit_s=0.1)
    with pytest.raises(ConfigError, match="the rendezvous no.such.host.:1 is no address"):
        join_rank0(("no.such.host.", 1), 1, 2, TRAITS, limit_s=0.1)


def test_rank_0_that_ends_during_the_join(meeting):
    meeting.join(1, size=4)

    def on_wait(what, _part):
        if what.startswith("waiting for rank 2, 3 at"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meeting.lead(size=4, limit_s=30, on_wait=on_wait)
    assert "rank 0 gave up" in str(meeting.end()[1])


def test_what_is_no_rank_0(meeting):
    def answer(data):
        link, _ = meeting.listener.accept()
        link.recv(1 << 16)
        link.sendall(data)
        link.close()

    for data, message in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no rank 0 of twinspark"),
        (b"", "closed the connection during the join"),
    ):
        thread = threading.Thread(target=answer, args=(data,))
        thread.start()
        with pytest.raises(RankFailed, match=message):
            join_rank0(meeting.address, 1, 2, TRAITS, limit_s=1)
        thread.join(10)


def test_strangers_are_sent_away_and_the_join_goes_on(meeting, monkeypatch):
    monkeypatch.setattr(join, "HELLO_S", 0.2)
    strangers = []
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\x02\x00\x00\x00{}"):
        strangers.append(socket.create_connection(meeting.address))
        strangers[-1].sendall(data)
    meeting.join(1)
    links = meeting.lead()
    assert isinstance(meeting.end()[1], join.Links)
    close(links)
    for stranger in strangers:
        stranger.close()


def say(meeting, **hello):
    """A connection of something that knows our notes."""
    link = socket.create_connection(meeting.address)
    send_note(link, {"greeting": GREETING, "rank": 1, **hello})
    return link


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_plan_link_needs_its_own_fate_link(meeting, comes_first):
    """Else one stray note would end the join: rank 0 stops listening with nobody there."""
    strays = []
    if comes_first:
        strays.append(say(meeting, type="plan"))
    meeting.join(1, size=4)

    def on_wait(what, _part):
        if what.startswith("waiting for rank 2, 3 at") and len(strays) < 2:
            strays.append(say(meeting, type="plan", rank=2, token="guessed"))
            strays.append(say(meeting, type="plan", rank=1, token="guessed"))
            strays.append(say(meeting, type="plan", rank=9))
            strays.append(say(meeting, type="fate", rank=True))
            for rank in (2, 3):
                meeting.join(rank, size=4)

    links = meeting.lead(size=4, on_wait=on_wait)
    found = meeting.end()
    assert all(isinstance(found[rank], join.Links) for rank in (1, 2, 3))
    for rank in (1, 2, 3):
        links.plan[rank].sendall(b"x")
        assert found[rank].plan[0].recv(1) == b"x"
    assert "must open its fate link first" in receive_note(strays[0], limit_s=5)["message"]
    close(links)
    for stray in strays:
        stray.close()


class Slow:
    """A stranger that announces a long note and gives a byte of it now and then."""

    def __init__(self, address):
        self.link = socket.create_connection(address)
        self.link.sendall(b"\x00\x01\x00\x00")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._trickle)
        self._thread.start()

    def _trickle(self):
        with suppress(OSError):
            while not self._over.wait(0.02):
                self.link.sendall(b" ")

    def close(self):
        self._over.set()
        self._thread.join(10)
        self.link.close()


def test_a_slow_stranger_does_not_hold_up_the_limit(meeting, monkeypatch):
    monkeypatch.setattr(join, "HELLO_S", 60.0)
    slow, begin = Slow(meeting.address), monotonic()
    with pytest.raises(RankFailed, match="rank 1 did not join within 0.3 s"):
        meeting.lead(limit_s=0.3)
    slow.close()
    assert monotonic() - begin < 5
    assert len(meeting.waits) > 5  # checks went on


def test_a_slow_stranger_does_not_hold_up_the_others(meeting, monkeypatch):
    monkeypatch.setattr(join, "HELLO_S", 60.0)
    slow = Slow(meeting.address)
    meeting.join(1)
    links = meeting.lead(limit_s=30)
    slow.close()
    assert isinstance(meeting.end()[1], join.Links)
    close(links)


def test_a_slow_stranger_is_sent_away_in_the_end(meeting, monkeypatch, caplog):
    monkeypatch.setattr(join, "HELLO_S", 0.1)
    slow = Slow(meeting.address)

    def on_wait(_what, _part):
        if "did not say in time" in caplog.text and not meeting.threads:
            meeting.join(1)

    links = meeting.lead(limit_s=30, on_wait=on_wait)
    slow.close()
    close(links)


def test_a_note_has_one_limit_however_slowly_it_comes(meeting):
    slow = Slow(meeting.address)
    link, _ = meeting.listener.accept()
    with link, pytest.raises(TimeoutError):
        receive_note(link, limit_s=0.2)
    slow.close()


def test_a_rank_that_goes_while_others_are_awaited_ends_the_join(meeting):
    meeting.join(1, size=4)
    came = []

    def on_wait(what, _part):
        if what.startswith("waiting for rank 2, 3 at") and not came:
            came.append(say(meeting, type="fate", rank=2, size=4, traits=TRAITS))
        elif came and came[0].fileno() >= 0:
            came[0].settimeout(0.01)
            with suppress(TimeoutError):
                came[0].recv(1 << 16)
                came[0].close()

    with pytest.raises(RankFailed, match="rank 2 is gone while other ranks were awaited"):
        meeting.lead(size=4, limit_s=30, on_wait=on_wait)
    assert "rank 2 is gone while other ranks were awaited" in str(meeting.end()[1])


def test_how_a_rank_of_ours_went_is_told_if_it_is_known(meeting):
    ended = []

    def check():
        if ended:
            raise RankFailed("rank 1 is gone before it joined: by SIGKILL")

    link = say(meeting, type="fate", size=4, traits=TRAITS)

    def go():
        receive_note(link, limit_s=10)
        ended.append(True)
        link.close()

    thread = threading.Thread(target=go)
    thread.start()
    with pytest.raises(RankFailed, match="rank 1 is gone before it joined: by SIGKILL"):
        meeting.lead(size=4, limit_s=30, check=check)
    thread.join(10)


def test_addresses():
    assert parse_address("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert parse_address("[::1]:5") == ("::1", 5)
    for text in ("", "host", ":5", "host:", "host:x", "host:70000", "host:-1"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            parse_address(text)
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="another rank 0"):
        listen(*taken.getsockname())
    with pytest.raises(ConfigError, match="give an address of this machine"):
        listen("no.such.host.", 1)
