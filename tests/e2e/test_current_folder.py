"""Files of the folder in which a server is started are nobody's modules."""

import sys
from pathlib import Path

import pytest
from tests.server_process import ServerProcess

NAMES = ("typer", "http", "torch", "llguidance")


def test_a_server_imports_nothing_of_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    flags = ["--port", "0", "--threads", "1", "--tp", "2"]
    server = ServerProcess([str(Path(sys.executable).parent / "twinspark"), "serve", *flags])
    try:
        server.wait_ready()
    finally:
        server.close()
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.py" for name in NAMES}
