"""Files of a pack that are no files, too large or unreadable: one FormatError each, at once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import tiny

from twinspark.errors import FormatError
from twinspark.pack import files
from twinspark.pack.reader import open_pack
from twinspark.text.tokenizer import Tokenizer


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def nowhere(path: Path) -> None:
    path.symlink_to("not-there")


def unreadable(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path.write_bytes(b"{}")
    path.chmod(0)


HOSTILE = [
    (pipe, "is a pipe"), (endless, "is a device"), (folder, "is a folder"),
    (nowhere, "No such file"), (unreadable, "Permission denied"),
]  # fmt: skip
Hostile = tuple[Callable[[Path], None], str]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return tiny.copy_pack(tiny.plain_path(), tmp_path / "pack")


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: h[0].__name__)
@pytest.mark.parametrize("name", ["config.json", "twinspark.json", "model.safetensors"])
def test_a_pack_of_such_files(pack: Path, name: str, hostile: Hostile) -> None:
    (pack / name).unlink(missing_ok=True)
    hostile[0](pack / name)
    with pytest.raises(FormatError, match=f"{name}.*{hostile[1]}"):
        open_pack(pack)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: h[0].__name__)
def test_files_read_later(pack: Path, hostile: Hostile) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        (pack / name).unlink(missing_ok=True)
        hostile[0](pack / name)
    opened = open_pack(pack, verify=False)
    with pytest.raises(FormatError, match=rf"generation_config\.json.*{hostile[1]}"):
        _ = opened.generation_config
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_file(opened.tokenizer_path)
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_file(pack / "tokenizer.json")


def test_a_pipe_in_place_of_the_pack(tmp_path: Path) -> None:
    pipe(tmp_path / "pack")
    with pytest.raises(FormatError, match="no folder"):
        open_pack(tmp_path / "pack")


def test_a_folder_that_may_not_be_listed(pack: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    pack.chmod(0o100)
    try:
        with pytest.raises(FormatError, match="Permission denied"):
            open_pack(pack)
    finally:
        pack.chmod(0o700)


def test_large_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(files.MAX_JSON_BYTES + 1)
    with pytest.raises(FormatError, match=rf"at most {files.MAX_JSON_BYTES};"):
        files.read_file(path)
    path.write_bytes(b"12345")
    assert files.read_file(path, 5) == b"12345"
    with pytest.raises(FormatError, match="has 5 bytes, expected at most 4"):
        files.read_file(path, 4)
