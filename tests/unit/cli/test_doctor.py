"""`twinspark doctor`, `prebuild` and the GPU benches where there is no GPU: what they say."""

import json
import socket

import pytest
import torch
from typer.testing import CliRunner

from twinspark.cli import doctor
from twinspark.cli.doctor import examine
from twinspark.cli.main import app
from twinspark.errors import ConfigError, KernelUnsupported
from twinspark.model import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
run = CliRunner().invoke


def test_a_machine_that_works_has_no_problem():
    done = run(app, ["doctor", "--port", "0", "--json"])
    assert done.exit_code == 0, done.output
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["gpu"]["verdict"] == "note" and checks["gpu"]["advice"]
    assert checks["demo pack"]["verdict"] == "ok"
    assert "bits" in checks["demo pack"]["found"]
    assert checks["compiler"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("count", "nccl", "verdict", "said"),
    [
        (0, False, "ok", "two processes on the CPU"),
        (1, False, "note", "no NCCL"),
        (1, True, "ok", "needs a second machine"),
        (2, True, "ok", "NCCL 2.27.5; --tp 2 runs on cuda:0 and cuda:1, which reach each other"),
    ],
)
def test_what_ranks_have_here(monkeypatch, count, nccl, verdict, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _one, _other: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(device, "why_not_launch", lambda _device: None)
    (found,) = doctor._ranks()
    assert found.verdict == verdict and said in found.found
    assert bool(found.advice) == (verdict == "note")


def test_a_broken_pack_is_a_problem(tmp_path):
    done = run(app, ["doctor", str(tmp_path)])
    assert done.exit_code == 1
    assert "FAIL  pack" in done.stdout


def test_a_taken_port_is_noted():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = {check.name: check for check in examine(None, port)}
    assert found[f"port {port}"].verdict == "note"


def test_a_port_that_cannot_be_is_refused():
    done = run(app, ["doctor", "--port", "99999"])
    assert done.exit_code == 2 and "65535" in done.output


def test_nobody_is_sent_to_compile_for_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {check.name: check for check in examine(None, 0)}
    assert found["kernel cache"].verdict == "ok" and not found["kernel cache"].advice


def test_the_kernel_cache_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "twinspark" / "kernels"
    folder.mkdir(parents=True)
    (folder / "rows-sm_121-abc.cubin").write_bytes(b"x" * 1000)
    found = {check.name: check for check in examine(None, 0)}
    assert "1 kernels" in found["kernel cache"].found


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        (["prebuild", "--device", "cpu"], ConfigError, "expected cuda"),
        (["prebuild"], ConfigError, "cuda"),
        (["bench", "kernels", "--only", "experts,fish"], ConfigError, "fish"),
        (["bench", "kernels"], KernelUnsupported, "CUDA"),
        (["bench", "rank", "--rows", "1,many"], ConfigError, "many"),
        (["bench", "rank", "--chunk", "64,9000"], ConfigError, "--chunk is '64,9000', expected"),
        (["bench", "rank", "--tp", "1", "--rank", "1"], ConfigError, "less than"),
        (["bench", "rank"], KernelUnsupported, "CUDA"),
    ],
)
def test_what_needs_a_gpu_says_so(args, error, says):
    done = run(app, args)
    assert isinstance(done.exception, error)
    assert says in str(done.exception)
