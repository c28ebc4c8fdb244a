"""One rank dies, stops, differs or fails: all end with 70 within seconds, with the cause named.

Times are upper bounds tied to the promise of three seconds, with room for a busy machine.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest
from tests.live_server import wait_until
from tests.lost_ranks import (
    ENDLESS,
    SOON_S,
    each_fault,
    ended,
    kill_or_stop,
    lose_rank_1,
    refused,
    running,
)
from tests.rank_packs import whole_pack
from tests.rank_process import RankProcess, children, free_address
from tests.server_process import ServerProcess, is_alive

from twinspark import LLM, Sampling
from twinspark.config.engine import EngineConfig
from twinspark.distributed.join import parse_address
from twinspark.distributed.leaving import EXIT_RANKS
from twinspark.engine.ranks import lead_ranks
from twinspark.errors import RankFailed
from twinspark.pack.reader import open_pack

CHILD = Path(__file__).with_name("rank_child.py")
LONG = {"max_position_embeddings": 8192}
SLACK_S = 5.0
SETTINGS = {"max_context_tokens": 4096, "page_tokens": 16, "slots": 2}


class Starter:
    """Starts ranks, which are ended whatever happens."""

    def __init__(self):
        self.started = []

    def __call__(self, zero, one, mode="well"):
        """Both ranks of a pair."""
        address = free_address()
        self.started.append(RankProcess(CHILD, zero, 0, address, "well"))
        return [self.started[-1], self.one(one, address, mode)]

    def one(self, path, address, mode="well"):
        """Rank 1 alone."""
        self.started.append(RankProcess(CHILD, path, 1, address, mode))
        return self.started[-1]


@pytest.fixture
def start():
    starter = Starter()
    yield starter
    for rank in starter.started:
        rank.close()


def in_time(begin, slack_s=SLACK_S):
    assert monotonic() - begin < SOON_S + slack_s


def test_ranks_that_differ_do_not_start(start):
    """Another pack, another setting, another version: each named, with both values."""
    exl3, plain = whole_pack("exl3", **LONG), whole_pack("plain", **LONG)
    pairs = [start(exl3, plain)]
    differences = {"setting slots is 3, rank 0 has 2": "slots", "version is 0.0.1, rank": "version"}
    config = EngineConfig(ranks=2, **SETTINGS)
    for difference, mode in differences.items():
        address = free_address()
        one = start.one(exl3, address, mode)
        with pytest.raises(RankFailed, match=f"rank 1 cannot join: its {difference}"):
            lead_ranks(
                open_pack(exl3),
                config,
                rendezvous=parse_address(address),
                on_wait=lambda _what, _part: None,
                commands=lambda _here: {},
            )
        pairs.append([one])
    for pair, difference in zip(pairs, ["pack digest is", *differences], strict=True):
        refused(pair, difference)


@each_fault
def test_a_fault_of_one_rank_ends_both(start, mode, cause):
    zero, one = start(whole_pack("exl3", **LONG), whole_pack("exl3", **LONG), mode)
    assert "Traceback" not in ended(zero, cause)
    assert ("Traceback" in ended(one, cause)) == (mode == "raises")


@kill_or_stop
def test_a_follower_that_loses_rank_0_ends_by_itself(start, how):
    zero, one = start(whole_pack("exl3", **LONG), whole_pack("exl3", **LONG))
    running(zero, one, 3, 60)
    begin = monotonic()
    zero.process.send_signal(how)
    said = ended(one, "rank 1 ended, because rank 0 is gone for it: ")
    in_time(begin)
    if how == signal.SIGSTOP:
        assert "it stopped answering" in said
        sleep(max(0.0, begin + 5 - monotonic()))
        zero.process.send_signal(signal.SIGCONT)
        ended(zero, "rank 1 ended, because rank 0 is gone for it: it stopped answering")


@kill_or_stop
def test_a_library_user_gets_an_error_and_goes_on(how):
    """A rank that was started here dies or stops in the middle of rounds, and is seen off."""
    llm = LLM(whole_pack("exl3", **LONG), ranks=2, **SETTINGS)
    pid = llm._loaded.team.local_pids[1]
    stream = llm.stream("ab", ENDLESS)
    next(stream)

    def gone_in_time(begin):
        wait_until(lambda: not is_alive(pid))
        in_time(begin)

    lose_rank_1(llm, stream, how, gone_in_time)
    alone = LLM(whole_pack("exl3", **LONG), **SETTINGS)
    assert len(alone.generate("ab", Sampling(max_tokens=2, ignore_eos=True)).token_ids) == 2


def test_a_clean_end_does_not_leave_a_stopped_rank_behind():
    """A server gives its engine five seconds: the stopped rank must be killed before that."""
    llm = LLM(whole_pack("exl3", **LONG), ranks=2, **SETTINGS)
    pid = llm._loaded.team.local_pids[1]
    os.kill(pid, signal.SIGSTOP)
    begin = monotonic()
    llm.close()
    assert not is_alive(pid)
    assert monotonic() - begin < SOON_S


def test_ranks_end_with_a_program_that_is_killed_before_they_joined():
    code = "import sys\nfrom twinspark import LLM\nLLM(sys.argv[1], ranks=2)\n"
    command = [sys.executable, "-c", code, str(whole_pack("exl3", **LONG))]
    with subprocess.Popen(command, start_new_session=True) as zero:
        wait_until(lambda: children(zero.pid), 60)
        (pid,) = children(zero.pid)
        zero.kill()
    try:
        wait_until(lambda: not is_alive(pid), 30)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Server(ServerProcess):
    def __init__(self, path):
        flags = ["--port", "0", "--tp", "2", "--max-context", "4096", "--grace", "0.2"]
        super().__init__([sys.executable, "-m", "twinspark", "serve", str(path), *flags])

    def follower(self):
        return children(self.engine_pid)[0]


@pytest.fixture
def server():
    found = Server(whole_pack("exl3", **LONG))
    yield found
    found.close()


def ask(url, **fields):
    body = {
        "messages": [{"role": "user", "content": "ab"}], "stream": True, "max_tokens": 4000,
        "ignore_eos": True,
    }  # fmt: skip
    return httpx.stream("POST", url + "/v1/chat/completions", json=body | fields, timeout=60)


def test_a_server_whose_follower_dies_answers_everybody_and_ends_with_70(server):
    url = server.wait_ready()
    engine_pid, follower = server.engine_pid, server.follower()
    with ask(url) as first, ask(url, seed=5) as second:
        lines = [first.iter_lines(), second.iter_lines()]
        for each in lines:
            next(each)
        begin = monotonic()
        os.kill(follower, signal.SIGKILL)
        for each in lines:
            data = [line.removeprefix("data: ") for line in each if line.startswith("data: {")]
            message = json.loads(data[-1])["error"]["message"]
            assert "rank 1 is gone: its process was killed by SIGKILL" in message
        in_time(begin)
    assert server.wait(20) == EXIT_RANKS, server.said
    in_time(begin, 2 * SLACK_S)
    assert "rank 1 is gone: its process was killed by SIGKILL" in server.said
    assert not is_alive(engine_pid) and not is_alive(follower)


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGSTOP, "rank 0 stopped answering"), (signal.SIGKILL, "was killed by SIGKILL")],
)
def test_a_server_whose_rank_0_stops_or_dies_answers_and_ends_with_70(server, number, cause):
    url = server.wait_ready()
    engine_pid, follower = server.engine_pid, server.follower()
    with ask(url) as reply:
        lines = reply.iter_lines()
        next(lines)
        begin = monotonic()
        os.kill(engine_pid, number)
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert cause in json.loads(data[-1])["error"]["message"]
        in_time(begin)
    assert server.wait(20) == EXIT_RANKS, server.said
    in_time(begin, 2 * SLACK_S)
    assert cause in server.said
    assert not is_alive(engine_pid) and not is_alive(follower)


def test_a_clean_stop_looks_like_no_failure(server):
    url = server.wait_ready()
    engine_pid, follower = server.engine_pid, server.follower()
    with ask(url) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, server.said
    assert not is_alive(engine_pid) and not is_alive(follower)
    assert "gone" not in server.said and "Traceback" not in server.said
