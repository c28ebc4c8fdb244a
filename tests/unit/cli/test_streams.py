"""Standard streams that are closed or full, and paths that cannot be written: one sentence."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from twinspark.cli import main
from twinspark.cli.console import LoadingLine, check_writable
from twinspark.errors import ConfigError
from twinspark.messages import Loading


def shell(arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.quote(sys.executable)} -m twinspark {arguments}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
def test_output_that_cannot_be_written(where: str) -> None:
    done = shell(f"--version {where}")
    assert done.returncode == 1
    assert done.stderr.startswith("twinspark: a read or write failed:")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_messages_that_cannot_be_written(where: str, tmp_path: Path) -> None:
    done = shell(f"inspect {tmp_path}/no {where}")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_chat_without_stdin_ends() -> None:
    done = shell("chat <&-")
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_errors_of_the_system_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.run(lambda: Path("/no/such/file").read_bytes())
    assert caught.value.code == 1
    assert "/no/such/file: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect x", "chat --once x", "bench engine", "logits x"])
def test_every_command_refuses_unknown_variables(command: str) -> None:
    done = shell(command, env={"TWINSPARK_TREADS": "1", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert "TWINSPARK_TREADS is not known. Did you mean TWINSPARK_THREADS?" in done.stderr


def test_results_are_refused_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "x.npy")
    with pytest.raises(ConfigError, match="does not exist"):
        check_writable(tmp_path / "no" / "x.npy")
    with pytest.raises(ConfigError, match="is a folder"):
        check_writable(tmp_path)
    for command in ("logits no-pack --ids 1", "inspect no-pack --tensor x"):
        done = shell(f"{command} --out {tmp_path}/no/x")
        assert done.returncode == 2 and "cannot write --out" in done.stderr


def test_loading_lines_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    LoadingLine(only_terminal=True).show(Loading(phase="loading", fraction=0.5))
    assert capsys.readouterr().err == ""
    LoadingLine().show(Loading(phase="loading", fraction=0.5))
    assert "50%" in capsys.readouterr().err
