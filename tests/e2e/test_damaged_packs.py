"""Damaged packs at the command line: one message, exit code 2, no traceback, before torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests import tiny
from tests.unit.pack.damages import DAMAGES, Damage

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
