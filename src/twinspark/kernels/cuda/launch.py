"""Machine code onto a device, and launches on torch's current stream.

Owns modules, functions and launch attributes; knows nothing of what a kernel computes. Read
compile.py first.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.compile import compile_cubin, why_not_compile

_ASK_ABOVE = 44 * 1024  # dynamic shared memory over 48 KB, less static, must be asked for


def why_not_launch(device: torch.device) -> str | None:
    """Why kernels of this package cannot run on `device`, or None when they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"it needs compute capability 9.0 or later, {device} has {major}.{minor}"
    return why_not_compile()


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index)


def device_arch(index: int) -> str:
    """Architecture of a CUDA device, as the compiler names it."""
    major, minor = capability(index)
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@cache
def num_processors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def shared_bytes(index: int) -> int:
    """Shared memory of one multiprocessor that a single block may take."""
    properties: Any = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_block_optin)


class CudaModule:
    """The kernels of one source file under one set of macros, on one device."""

    def __init__(
        self, source: Path, index: int, defines: Mapping[str, int], cache_dir: Path | None = None
    ) -> None:
        """Compile and load.

        Raises:
            KernelUnsupported: it cannot be compiled or loaded; the text says why.
        """
        cubin = compile_cubin(source, arch=device_arch(index), defines=defines, cache_dir=cache_dir)
        self._driver = _driver()
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # the device's context is current now
            self._module = _checked(self._driver.cuModuleLoadData(cubin))

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        args: tuple["Tensor | Pointer | int | None", ...],
        *,
        shared: int = 0,
    ) -> None:
        """Launch on the current stream of the current device.

        The kernel may start before the one ahead of it has ended: it must wait for it by
        griddepcontrol.wait before it touches anything an earlier kernel reads or writes.

        Args:
            name: the kernel.
            grid: blocks.
            threads: threads a block.
            args: in order; tensors and addresses go as pointers, None as a null pointer, the rest
                as C ints.
            shared: bytes of dynamic shared memory.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        overlap = driver.CUlaunchAttribute()
        overlap.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        overlap.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [overlap]
        config.numAttrs = 1
        values = tuple(_value(arg) for arg in args)
        types = tuple(ctypes.c_int if isinstance(a, int) else ctypes.c_void_p for a in args)
        _checked(driver.cuLaunchKernelEx(config, self._function(name, shared), (values, types), 0))

    def _function(self, name: str, shared: int) -> Any:
        attribute = self._driver.CUfunction_attribute
        function = self._functions.get(name)
        if function is None:
            function = _checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
            carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            _checked(self._driver.cuFuncSetAttribute(function, carveout, 100))
            self._functions[name] = function
        if shared > _ASK_ABOVE and shared > self._shared.get(name, 0):
            limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(self._driver.cuFuncSetAttribute(function, limit, shared))
            self._shared[name] = shared
        return function


@dataclass(frozen=True)
class Pointer:
    """Memory of a device that is no tensor's."""

    address: int


def _value(arg: Tensor | Pointer | int | None) -> int:
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    if isinstance(arg, Pointer):
        return arg.address
    return arg or 0


@cache
def _driver() -> ModuleType:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise KernelUnsupported(
            f"CUDA kernels cannot be launched here ({error}); install cuda-bindings"
        ) from error


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return values[0] if values else None
