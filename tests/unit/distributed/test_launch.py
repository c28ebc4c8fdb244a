"""Ranks of this machine: none outlives an interrupted start, an impatient end, or rank 0."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import sleep

import pytest
from tests.live_server import wait_until
from tests.server_process import is_alive

from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.distributed import launch
from twinspark.distributed.launch import LocalRanks
from twinspark.engine.ranks import rank_commands
from twinspark.errors import RankFailed
from twinspark.model import device

PARENT = """
import os, subprocess, sys, time
command = [*sys.argv[1:], "--parent", str(os.getpid())]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def ranks():
    found = LocalRanks()
    yield found
    found.end(0)


@pytest.fixture
def interrupt():
    """Raises KeyboardInterrupt in the main thread, so many seconds from now."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda after_s: signal.setitimer(signal.ITIMER_REAL, after_s)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_start_leaves_nothing_behind(ranks, interrupt, monkeypatch):
    popen, pids = subprocess.Popen, []

    def slow(*args, **kwargs):
        child = popen(*args, **kwargs)
        pids.append(child.pid)
        sleep(0.3)  # born, but not noted so far
        return child

    monkeypatch.setattr(launch.subprocess, "Popen", slow)
    interrupt(0.1)
    with pytest.raises(KeyboardInterrupt):
        ranks.start({1: SLEEPER, 2: SLEEPER, 3: SLEEPER})
    ranks.end(0)
    assert len(pids) == 1 and not is_alive(pids[0])


def test_an_interrupted_end_kills(ranks, interrupt):
    ranks.start({1: SLEEPER, 2: SLEEPER})
    pids = ranks.pids
    interrupt(0.1)
    with pytest.raises(KeyboardInterrupt):
        ranks.end(600)
    assert sorted(pids) == [1, 2] and not any(map(is_alive, pids.values()))


def test_a_program_that_is_not_there(ranks):
    with pytest.raises(RankFailed, match="cannot start the ranks of this machine: .*no-such"):
        ranks.start({1: SLEEPER, 2: ["/no-such-program"]})
    pid = ranks.pids[1]
    ranks.end(0)
    assert not is_alive(pid)


def test_a_rank_started_here_is_told_its_parent():
    commands = rank_commands(Path("p"), EngineConfig(ranks=2), verify=True, log_level="info")
    command = commands(("127.0.0.1", 5))[1]
    assert command[command.index("--parent") + 1] == str(os.getpid())


def test_ranks_started_here_take_the_devices_after_the_first(monkeypatch):
    monkeypatch.setattr(device, "_why_not", lambda _device, _ranks: None)
    config = EngineConfig(ranks=4, virtual_shards=4, device="cuda:1")
    commands = rank_commands(Path("p"), config, verify=True, log_level="info")
    found = {
        rank: json.loads(command[command.index("--settings") + 1])["device"]
        for rank, command in commands(("127.0.0.1", 5)).items()
    }
    assert found == {1: "cuda:2", 2: "cuda:3", 3: "cuda:4"}


@pytest.mark.parametrize("form", ["rank-worker", "logits"])
def test_a_rank_whose_parent_dies_before_the_join_ends(form):
    """It would look for rank 0 for minutes otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    own = ["--ids", "1", "--out", "unused", "--tp", "2"] if form == "logits" else []
    command = [sys.executable, "-m", "twinspark", form, str(demo_pack_path()), *own]
    program = [sys.executable, "-c", PARENT, *command, "--rank", "1", "--rendezvous", address]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    try:
        wait_until(lambda: not is_alive(pid), 30)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
