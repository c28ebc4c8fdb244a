"""Damaged packs at the command line: one message, exit code 2, no traceback, before torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import tiny
from tests.unit.pack.damages import DAMAGES, Damage

from twinspark.config.paths import demo_pack_path

PROGRAM = """
import atexit, sys
from twinspark.cli.main import main
atexit.register(lambda: print("torch loaded:", "torch" in sys.modules, file=sys.stderr))
sys.argv = ["twinspark", *sys.argv[1:]]
main()
"""
# one of each class: container, files, config, missing, shape, marker, surplus, other kind of pack
CHOSEN = {
    "shard cut", "shard missing", "config not JSON", "matrix missing", "trellis reshaped",
    "both markers", "surplus tensor", "unknown quantization",
}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d[0] in CHOSEN], ids=lambda d: d[0])
def test_serve_refuses(tmp_path: Path, damage: Damage) -> None:
    pack = tiny.copy_pack(tiny.exl3_path(), tmp_path / "pack")
    damage[1](pack)
    done = run("serve", str(pack), "--port", "0")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert "torch loaded: False" in done.stderr
    with pytest.raises(damage[2], match=damage[3]):
        raise damage[2](done.stderr)


@pytest.mark.parametrize("arguments", [("chat", "--once", "hi"), ("inspect",), ("serve",)])
def test_no_pack(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    done = run(arguments[0], str(gguf), *arguments[1:])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "is a GGUF file; supported are DeepSeek-V4.1-Flash packs" in done.stderr
    assert "torch loaded: False" in done.stderr


def test_inspect_lists_what_is_wrong(tmp_path: Path) -> None:
    pack = tiny.copy_pack(tiny.exl3_path(), tmp_path / "pack")
    min(pack.glob("model-*.safetensors")).unlink()
    done = run("inspect", str(pack))
    assert done.returncode == 2
    assert "lacks model-00001-of" in done.stdout and "torch loaded: False" in done.stderr


@pytest.fixture
def demo_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_pack_path(), tmp_path / "demo-copy"))


def test_serve_refuses_before_it_listens(demo_copy: Path) -> None:
    done = run("serve", str(demo_copy), "--port", "0", "--max-context", "9999999")
    assert done.returncode == 2 and done.stderr.count("max_context_tokens is 9999999") == 1
    (demo_copy / "twinspark.json").unlink()
    good = (demo_copy / "tokenizer.json").read_bytes()
    (demo_copy / "tokenizer.json").write_bytes(b"{}")
    bad_tokenizer = run("serve", str(demo_copy), "--port", "0")
    (demo_copy / "tokenizer.json").write_bytes(good)
    (demo_copy / "generation_config.json").write_text('{"temperature": -1}')
    bad_defaults = run("serve", str(demo_copy), "--port", "0")
    for found, word in ((bad_tokenizer, "tokenizer.json"), (bad_defaults, "temperature is -1")):
        assert found.returncode == 2 and word in found.stderr
        assert "listening" not in found.stderr and "torch loaded: False" in found.stderr


def test_an_edited_pack_runs_without_checksums(demo_copy: Path) -> None:
    with (demo_copy / "generation_config.json").open("a") as file:
        file.write(" ")
    once = ("chat", str(demo_copy), "--once", "hi", "--max-tokens", "2")
    refused = run(*once)
    assert refused.returncode == 2 and "pass --no-checksums" in refused.stderr
    assert run(*once, "--no-checksums").returncode == 0
