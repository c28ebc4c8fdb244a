"""Damaged packs at the command line: one message, exit code 2, no traceback, before torch."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests import tiny
from tests.unit.pack.damages import DAMAGES

from twinspark.config.paths import demo_pack_path

PROGRAM = """
import contextlib, io, json, sys
from twinspark.cli.main import main
found = []
for arguments in json.load(sys.stdin):
    sys.argv, code = ["twinspark", *arguments], None
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    found.append([code, out.getvalue(), told.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""
# one of each class: container, files, config, missing, shape, marker, surplus, other kind of pack
CHOSEN = {
    "shard cut", "shard missing", "config not JSON", "matrix missing", "trellis reshaped",
    "both markers", "surplus tensor", "unknown quantization",
}  # fmt: skip


class Done(NamedTuple):
    code: int
    out: str
    told: str
    has_torch: bool


def run(*commands: Sequence[str]) -> list[Done]:
    """Command lines one after another in one process: to start costs more than to refuse."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [Done(*found) for found in json.loads(done.stdout)]


def test_serve_refuses(tmp_path: Path) -> None:
    chosen = [damage for damage in DAMAGES if damage[0] in CHOSEN]
    packs = []
    for name, damage, _, _ in chosen:
        packs.append(tiny.copy_pack(tiny.exl3_path(), tmp_path / name))
        damage(packs[-1])
    found = run(*[("serve", str(pack), "--port", "0") for pack in packs])
    assert len(found) == len(CHOSEN)
    for (_, _, error, message), done in zip(chosen, found, strict=True):
        assert done.code == 2, done
        assert "Traceback" not in done.told and done.out == ""
        assert not done.has_torch
        with pytest.raises(error, match=message):
            raise error(done.told)


def test_no_pack(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    commands = (("chat", str(gguf), "--once", "hi"), ("inspect", str(gguf)), ("serve", str(gguf)))
    for done in run(*commands):
        assert done.code == 2 and "Traceback" not in done.told
        assert "is a GGUF file; supported are DeepSeek-V4.1-Flash packs" in done.told
        assert not done.has_torch


def test_inspect_lists_what_is_wrong(tmp_path: Path) -> None:
    pack = tiny.copy_pack(tiny.exl3_path(), tmp_path / "pack")
    min(pack.glob("model-*.safetensors")).unlink()
    (done,) = run(("inspect", str(pack)))
    assert done.code == 2
    assert "lacks model-00001-of" in done.out and not done.has_torch


@pytest.fixture
def demo_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_pack_path(), tmp_path / "demo-copy"))


def test_serve_refuses_before_it_listens(demo_copy: Path) -> None:
    bad_tokenizer = Path(shutil.copytree(demo_copy, demo_copy.with_name("bad-tokenizer")))
    bad_defaults = Path(shutil.copytree(demo_copy, demo_copy.with_name("bad-defaults")))
    for pack in (bad_tokenizer, bad_defaults):
        (pack / "twinspark.json").unlink()
    (bad_tokenizer / "tokenizer.json").write_bytes(b"{}")
    (bad_defaults / "generation_config.json").write_text('{"temperature": -1}')
    serve = ("serve", "--port", "0")
    too_long, *others = run(
        (*serve, str(demo_copy), "--max-context", "9999999"),
        (*serve, str(bad_tokenizer)),
        (*serve, str(bad_defaults)),
    )
    assert too_long.code == 2 and too_long.told.count("max_context_tokens is 9999999") == 1
    for found, word in zip(others, ("tokenizer.json", "temperature is -1"), strict=True):
        assert found.code == 2 and word in found.told
        assert "listening" not in found.told and not found.has_torch


def test_an_edited_pack_runs_without_checksums(demo_copy: Path) -> None:
    with (demo_copy / "generation_config.json").open("a") as file:
        file.write(" ")
    once = ("chat", str(demo_copy), "--once", "hi", "--max-tokens", "2")
    refused, allowed = run(once, (*once, "--no-checksums"))
    assert refused.code == 2 and "pass --no-checksums" in refused.told and not refused.has_torch
    assert not allowed.code
