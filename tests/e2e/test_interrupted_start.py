"""Ctrl-C before a server is ready: one line and exit code 130, whatever it was doing."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.live_server import wait_until
from tests.server_process import ServerProcess, is_alive

SAID = "twinspark: interrupted before the server was ready\n"
# Runs a command and presses Ctrl-C when it imports a module, having printed its child processes.
PRESS = """
import builtins, os, signal, sys
how, moment = sys.argv[1:3]
real = builtins.__import__

class Dying:
    def __del__(self):  # an exception from here is written down and forgotten
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))

def press(name, *rest, **more):
    if name == moment:
        builtins.__import__ = real
        with open("/proc/thread-self/children") as children:
            print(children.read(), flush=True)
        Dying() if how == "callback" else os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **more)

import twinspark.__main__ as command
builtins.__import__ = press
sys.argv = ["twinspark", *sys.argv[3:]]
command.main()
"""
MOMENTS = (
    "twinspark.cli.main",  # the command itself
    "twinspark.config.server",  # its settings
    "twinspark.pack.reader",  # the pack
    "twinspark.server.link",  # the port is bound
    "twinspark.cli.lifecycle",  # the engine is started
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("command", ["serve", "demo"])
@pytest.mark.parametrize("how", ["code", "callback"])
def test_at_a_moment_of_the_start(command: str, moment: str, how: str) -> None:
    port = str(free_port())
    done = subprocess.run(
        [sys.executable, "-c", PRESS, how, moment, command, "--port", port],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, SAID)
    engines = [int(pid) for pid in done.stdout.split()]
    assert len(engines) == (moment == MOMENTS[-1])
    wait_until(lambda: not any(map(is_alive, engines)))


@pytest.mark.parametrize("command", ["serve", "demo"])
@pytest.mark.parametrize("sign", ["listening on", "loading weights"])
def test_while_the_model_loads(command: str, sign: str) -> None:
    arguments = [sys.executable, "-m", "twinspark", command, "--port", str(free_port())]
    process = ServerProcess(arguments)
    try:
        wait_until(lambda: sign in process.said, 20)
        engine_pid = process.engine_pid
        process.process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130, process.said
        wait_until(lambda: not is_alive(engine_pid), 1)  # a killed one is gone in a moment
        assert process.said.count(SAID) == 1
        assert "loading" not in process.said.partition(SAID)[2]
        assert "Traceback" not in process.said
    finally:
        process.close()


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As the shell starts what runs in the background."""
    code = f"import signal; signal.signal(2, signal.SIG_IGN)\n{PRESS}"
    done = subprocess.run(
        [sys.executable, "-c", code, "code", "twinspark.pack.reader", "serve", str(tmp_path)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2 and SAID not in done.stderr


def test_a_rank_that_follows_ends_as_other_commands_do() -> None:
    arguments = ["serve", "--rank", "1", "--tp", "2", "--rendezvous", "127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-c", PRESS, "code", "twinspark.engine.ranks", *arguments],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 130 and SAID not in done.stderr, done.stderr
