import os
import threading
from pathlib import Path

import pytest

from twinspark.errors import ConfigError
from twinspark.evals.output import check_output, is_rewritten, write_output


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to("real")  # dangling at first
    for text in (b"one", b"two"):
        write_output(link, text)
        assert link.is_symlink() and real.read_bytes() == text
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


@pytest.mark.parametrize("by_link", [False, True])
def test_a_pipe_is_written_into_and_stays(tmp_path: Path, by_link: bool) -> None:
    fifo, path = tmp_path / "fifo", tmp_path / "fifo"
    os.mkfifo(fifo)
    if by_link:
        path = tmp_path / "link"
        path.symlink_to(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    write_output(path, b"x" * 200_000)
    reader.join(10)
    assert got == [b"x" * 200_000] and fifo.is_fifo() and not is_rewritten(path)


def test_the_file_of_stdout_is_added_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"table\n")
    write_output(Path("/dev/stdout"), b"json\n")
    assert capfd.readouterr().out == "table\njson\n"


@pytest.mark.parametrize("length", [250, 255])
def test_a_long_name_can_be_written(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("n" * length)
    check_output(path, option="--json")
    assert not list(tmp_path.iterdir())
    write_output(path, b"x")
    assert path.read_bytes() == b"x"


def test_what_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    for path in (tmp_path / ("n" * 256), Path("/proc/x.json"), tmp_path / "no" / "x"):
        with pytest.raises(ConfigError, match="cannot write --json"):
            check_output(path, option="--json")
