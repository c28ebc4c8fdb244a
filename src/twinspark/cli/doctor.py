"""`twinspark doctor`: what runs on this machine, what does not, why, and what to do about it.

Every check is a line with a verdict; nothing is changed. Read next: `prebuild.py`.
"""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from twinspark.errors import ConfigError, TwinSparkError
from twinspark.version import VERSION

Verdict = Literal["ok", "note", "problem"]
_MARKS: dict[Verdict, str] = {"ok": "ok  ", "note": "note", "problem": "FAIL"}
_LIBRARIES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "tokenizers", "orjson")
_LEAST_PYTHON = (3, 11)
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        verdict: "note" changes what runs, "problem" stops something that was asked for.
        found: what is there.
        advice: what to do about it, or "".
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    pack: Annotated[
        Path | None, typer.Argument(help="Also check this pack; none: the demo pack.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port that `serve` would take.")
    ] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON list.")] = False,
) -> None:
    """Check this machine: Python, libraries, GPUs, kernels, folders, memory, a pack.

    Exit code 1 means that something asked for would not work.
    """
    checks = []
    for check in examine(pack, port):
        checks.append(check)
        if not as_json:
            print(f"{_MARKS[check.verdict]}  {check.name:<16} {check.found}")
            if check.advice:
                print(f"{'':24}{check.advice}")
    if as_json:
        import json

        print(json.dumps([asdict(check) for check in checks], indent=1))
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(1)


def examine(pack: Path | None, port: int) -> Iterator[Check]:
    """All checks, as they are made."""
    yield _python()
    yield _libraries()
    for check in (_torch, _kernels, _ranks, _kernel_cache, _memory):
        yield from check()
    yield _port(port)
    yield from _pack(pack)


def _python() -> Check:
    found = f"{platform.python_version()}, twinspark {VERSION}, {platform.machine()}"
    if sys.version_info[:2] >= _LEAST_PYTHON:
        return Check(name="python", verdict="ok", found=found)
    least = ".".join(map(str, _LEAST_PYTHON))
    return Check(
        name="python", verdict="problem", found=found, advice=f"install Python {least} or later"
    )


def _libraries() -> Check:
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} missing")
    return Check(name="libraries", verdict="ok", found=", ".join(found))


def _torch() -> Iterator[Check]:
    import torch

    cores = os.cpu_count() or 1
    yield Check(name="cpu", verdict="ok", found=f"{cores} cores, torch {torch.__version__}")
    if torch.version.cuda is None:
        yield Check(
            name="gpu",
            verdict="note",
            found="this torch is built for the CPU only",
            advice="for a GPU install a CUDA build of torch; everything else stays",
        )
    elif not torch.cuda.is_available():
        yield Check(
            name="gpu",
            verdict="note",
            found=f"torch is built for CUDA {torch.version.cuda}, but finds no device",
            advice="look at nvidia-smi: the driver may be missing, or too old for this build",
        )
    else:
        for index in range(torch.cuda.device_count()):
            yield _gpu(index)


def _gpu(index: int) -> Check:
    import torch

    facts = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found = (
        f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
        f"{facts.multi_processor_count} multiprocessors, "
        f"{free / _GB:.0f} of {total / _GB:.0f} GB free"
    )
    return Check(name=f"gpu cuda:{index}", verdict="ok", found=found)


def _kernels() -> Iterator[Check]:
    import torch

    from twinspark.kernels.cuda.compile import compiler_version, why_not_compile
    from twinspark.kernels.cuda.launch import why_not_launch

    reason = why_not_compile()
    if reason is None:
        found = "run-time compiler " + ".".join(map(str, compiler_version()))
        yield Check(name="compiler", verdict="ok", found=found)
    else:
        yield Check(name="compiler", verdict="note", found=reason)
    for index in range(torch.cuda.device_count()):
        why = why_not_launch(torch.device("cuda", index))
        if why is None:
            yield Check(name=f"kernels cuda:{index}", verdict="ok", found="all CUDA bodies run")
        else:
            yield Check(name=f"kernels cuda:{index}", verdict="problem", found=why)
    yield Check(name="kernels cpu", verdict="ok", found="reference bodies in torch")


def _ranks() -> Iterator[Check]:
    """Whether `--tp 2` has GPUs here, and what they meet through."""
    import torch

    from twinspark.model.device import choose_device

    count = torch.cuda.device_count()
    if count == 0:
        yield Check(name="ranks", verdict="ok", found="--tp 2 runs as two processes on the CPU")
        return
    if not torch.distributed.is_nccl_available():
        yield Check(
            name="ranks", verdict="note", found="this torch has no NCCL: ranks cannot use GPUs",
            advice="install a CUDA build of torch for Linux, or use --device cpu with --tp",
        )  # fmt: skip
        return
    nccl = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if count == 1:
        yield Check(
            name="ranks", verdict="ok",
            found=f"{nccl}; one GPU here, so --tp 2 needs a second machine (--rendezvous)",
        )  # fmt: skip
        return
    try:
        choose_device("cuda", ranks=2)
    except ConfigError as error:
        yield Check(name="ranks", verdict="note", found=str(error))
        return
    reach = "reach" if torch.cuda.can_device_access_peer(0, 1) else "do not reach"
    yield Check(
        name="ranks", verdict="ok",
        found=f"{nccl}; --tp 2 runs on cuda:0 and cuda:1, which {reach} each other's memory",
    )  # fmt: skip


def _kernel_cache() -> Iterator[Check]:
    import torch

    from twinspark.config.paths import compiled_kernels_path

    folder = compiled_kernels_path()
    if not folder.is_dir():
        fill = "`twinspark prebuild` fills it, so that the first start compiles nothing"
        yield Check(
            name="kernel cache",
            verdict="note" if torch.cuda.is_available() else "ok",
            found=f"{folder} does not exist yet",
            advice=fill if torch.cuda.is_available() else "",
        )
        return
    files = list(folder.glob("*.cubin"))
    size = sum(file.stat().st_size for file in files) / 1e6
    found = f"{folder}: {len(files)} kernels, {size:.1f} MB"
    if os.access(folder, os.W_OK):
        yield Check(name="kernel cache", verdict="ok", found=found)
    else:
        yield Check(
            name="kernel cache", verdict="note", found=f"{found}, not writable",
            advice="kernels are compiled again at every start; make the folder writable",
        )  # fmt: skip


def _memory() -> Iterator[Check]:
    from twinspark.engine.memory import LocalMemory

    (usable,) = LocalMemory().usable()
    found = "unknown" if usable is None else f"{usable / _GB:.1f} GB usable"
    disk = shutil.disk_usage(Path.home() if Path.home().is_dir() else Path("/"))
    yield Check(name="memory", verdict="ok", found=f"{found}, disk {disk.free / _GB:.0f} GB free")


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                name=f"port {port}", verdict="note", found=f"taken ({error.strerror})",
                advice="a server may be running; else give `serve` another --port",
            )  # fmt: skip
    return Check(name=f"port {port}", verdict="ok", found="free")


def _pack(pack: Path | None) -> Iterator[Check]:
    from twinspark.config.paths import demo_pack_path
    from twinspark.pack.summary import summarize

    name = "demo pack" if pack is None else "pack"
    try:
        summary = summarize(pack or demo_pack_path())
    except TwinSparkError as error:
        yield Check(name=name, verdict="problem", found=str(error))
        return
    size = sum(summary.files.values()) / _GB
    widths = sorted({matrix.bits for matrix in summary.matrices if matrix.codebook})
    found = f"{summary.path}: {size:.2f} GB, {len(summary.matrices)} matrices"
    if widths:
        found += f", {' '.join(f'{bits:g}' for bits in widths)} bits"
    wrong = [*(f"{name} is missing" for name in summary.missing), *summary.problems]
    if not wrong:
        yield Check(name=name, verdict="ok", found=f"{found}, checksums {summary.checksums}")
        return
    yield Check(
        name=name, verdict="problem", found=f"{found}; {wrong[0]}",
        advice=f"{len(wrong)} findings; `twinspark inspect {summary.path}` lists them",
    )  # fmt: skip
