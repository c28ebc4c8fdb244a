import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from twinspark.cli import main
from twinspark.cli.hangups import end_by_hangups, heed_hangups
from twinspark.cli.serve import base_url, bind
from twinspark.errors import (
    CapacityError,
    ChecksumError,
    ConfigError,
    EngineDied,
    KernelUnsupported,
    RequestError,
    TwinSparkError,
)

SLOW_MODULES = "torch numpy pydantic starlette uvicorn tokenizers openai httpx"


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys, twinspark.cli.main\n"
        f"found = [m for m in {SLOW_MODULES.split()} if m in sys.modules]\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Runs a command up to its first slow import, and says whether it survives a hangup by then.
UNTIL_SLOW = """
import signal, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("typer", "orjson", "dataclasses", "twinspark.messages"):
            is_heeded = signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
            sys.exit(f"heeded {is_heeded}")

for name in ("typer", "orjson", "dataclasses"):
    sys.modules.pop(name, None)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.meta_path.insert(0, Slow())
from twinspark.__main__ import main
main()
"""


@pytest.mark.parametrize(("command", "is_heeded"), [("serve", True), ("inspect", False)])
def test_a_server_heeds_hangups_before_anything_slow(command: str, is_heeded: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNTIL_SLOW, command], capture_output=True, text=True
    )
    assert done.stderr.strip() == f"heeded {is_heeded}"


def test_a_rank_that_follows_ends_by_a_hangup() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        heed_hangups()
        assert callable(signal.getsignal(signal.SIGHUP))
        end_by_hangups()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        end_by_hangups()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_help_names_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twinspark", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for command in ("serve", "chat", "logits", "demo"):
        assert command in done.stdout
    assert "engine-worker" not in done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2), (ChecksumError("x"), 2), (RequestError("x"), 2),
        (KernelUnsupported("x"), 2),
        (CapacityError("x"), 1), (EngineDied("x"), 1), (KeyboardInterrupt(), 130),
    ],
)  # fmt: skip
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        main.run(fail)
    assert caught.value.code == code
    expected = "twinspark: x\n" if isinstance(error, TwinSparkError) else ""
    assert capsys.readouterr() == ("", expected)


def test_our_own_faults_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main.run(lambda: 1 / 0)


def test_a_pack_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twinspark", "serve", str(tmp_path / "no")],
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and str(tmp_path / "no") in done.stderr
    assert done.stdout == ""


def test_unknown_options_are_usage_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twinspark", "serve", "--colour"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "--colour" in done.stderr


def test_a_taken_port_is_refused_with_advice() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert base_url(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        bind("203.0.113.1", 0)
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)
    for host in ("..", "xx..yy", "a" * 70, "a\0b"):
        with pytest.raises(ConfigError, match="cannot use the address"):
            bind(host, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6_addresses_are_bracketed() -> None:
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 loopback here")
    with listener:
        assert base_url(listener).startswith("http://[::1]:")


def test_ctrl_c_while_the_command_is_imported() -> None:
    """The signal comes from inside an import of the command's own."""
    code = (
        "import os, signal, sys, builtins\n"
        "real = builtins.__import__\n"
        "def press(name, *rest):\n"
        "    if name == 'twinspark.cli.main':\n"
        "        builtins.__import__ = real\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "import twinspark.__main__ as command\n"
        "builtins.__import__ = press\n"
        "sys.argv = ['twinspark', 'eval', '--help']\n"
        "command.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
