"""CUDA C++ source to machine code for one architecture, with a cache on disk.

Needs the run-time compiler only: no toolkit, no driver, no GPU, so CPU machines can check every
kernel. Read next: launch.py.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from twinspark.errors import KernelUnsupported

ARCHITECTURES = ("sm_90a", "sm_121")
"""What the kernels are written for: H200 and GB10."""


class _Kept:
    """Where results are kept when a caller names no folder. It changes no bit of any result."""

    folder: Path | None = None


_KEPT = _Kept()

_INCLUDE = re.compile(rb'^#include "([\w./]+)"', re.MULTILINE)
_OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


def keep_cubins_in(folder: Path) -> None:
    """Keep compiled kernels of this process there from now on; call it once, at start."""
    _KEPT.folder = folder


def why_not_compile() -> str | None:
    """Why CUDA C++ cannot be compiled here, or None when it can."""
    try:
        _nvrtc()
    except KernelUnsupported as error:
        return str(error)
    return None


def compile_cubin(
    source: Path, *, arch: str, defines: Mapping[str, int], cache_dir: Path | None = None
) -> bytes:
    """Compile one file.

    Args:
        source: the .cu file; it includes files by their path from its folder, which include none.
        arch: "sm_90a" or the like.
        defines: macros and their values.
        cache_dir: where results are kept between processes; None is the folder given to
            `keep_cubins_in`, if any. A file there is named by everything the result depends on,
            and appears whole or not at all.

    Returns:
        The machine code.

    Raises:
        KernelUnsupported: the compiler is missing, does not know `arch` or refuses the source.
    """
    cache_dir = cache_dir or _KEPT.folder
    text = source.read_bytes()
    headers = _headers(source.parent, text)
    options = [f"--gpu-architecture={arch}", *_OPTIONS]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    if cache_dir is None:
        return _compile(source.name, text, headers, options)
    key = hashlib.sha256(repr((text, headers, options, compiler_version())).encode()).hexdigest()
    kept = cache_dir / f"{source.stem}-{arch}-{key[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        cubin = _compile(source.name, text, headers, options)
    _write_whole(kept, cubin)
    return cubin


@cache
def _nvrtc() -> ModuleType:
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise KernelUnsupported(
            f"CUDA C++ cannot be compiled here ({error}); "
            "install cuda-bindings and nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


@cache
def compiler_version() -> tuple[int, int]:
    """Major and minor version of the run-time compiler.

    Raises:
        KernelUnsupported: there is none.
    """
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return major, minor


def _headers(folder: Path, text: bytes) -> dict[bytes, bytes]:
    """Files of `folder` that `text` includes by name."""
    names: list[bytes] = _INCLUDE.findall(text)
    return {name: (folder / name.decode()).read_bytes() for name in names}


def _compile(name: str, text: bytes, headers: Mapping[bytes, bytes], options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text, name.encode(), len(headers), list(headers.values()), list(headers)
        )
    )
    try:
        encoded = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        if int(status):
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.rstrip(b"\0").decode(errors="replace").strip()
            raise KernelUnsupported(
                f"{name} does not compile for {' '.join(options)}: {status.name}\n{said}"
            )
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise KernelUnsupported(f"the CUDA run-time compiler failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _write_whole(path: Path, data: bytes) -> None:
    """Write so that readers see the whole file or none; a cache that cannot be kept is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        return
