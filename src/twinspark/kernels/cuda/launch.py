"""Machine code onto a device, and launches on torch's current stream.

Owns modules, functions and launch attributes; knows nothing of what a kernel computes. Read
compile.py first.
"""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from struct import Struct
from threading import local
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.compile import compile_cubin, why_not_compile

_ASK_ABOVE = 44 * 1024  # dynamic shared memory over 48 KB, less static, must be asked for
_MOST_CONFIGS = 1024  # of a module; grids differ with the rows of prompts
_HERE: AbstractContextManager[None] = nullcontext()

Room = tuple[Callable[..., None], Any, int, Any]
"""How to write values, where, the address of their addresses, and what keeps these."""


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


def peak_clock_mhz(index: int) -> int:
    """Fastest clock of a device's multiprocessors, MHz; under load it may be lower."""
    driver = _driver()
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    return int(_checked(driver.cuDeviceGetAttribute(kind, index))) // 1000


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one; costs next to nothing where it is that already."""
    # torch.cuda.current_device() first looks whether CUDA is there: it is, with tensors on it
    if torch._C._cuda_getDevice() == device.index:
        return _HERE
    return torch.cuda.device(device)


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
        self._launch = self._driver.cuLaunchKernelEx
        self._index = index
        self._configs: dict[tuple[object, ...], Any] = {}
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
        # torch.cuda.current_stream() takes longer than all the rest of this together
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        found = self._configs.get((name, grid, threads, shared, stream))
        if found is None:
            found = self._configured(name, grid, threads, shared, stream)
        config, function = found
        result = self._launch(config, function, _PARAMS.put(args), 0)
        if result[0]:
            _checked(result)

    def _configured(
        self, name: str, grid: tuple[int, int, int], threads: int, shared: int, stream: int
    ) -> tuple[Any, Any]:
        """A launch configuration, which is kept, and the function."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = stream
        overlap = driver.CUlaunchAttribute()
        overlap.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        overlap.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [overlap]
        config.numAttrs = 1
        if len(self._configs) >= _MOST_CONFIGS:
            self._configs.clear()
        found = config, self._function(name, shared)
        self._configs[name, grid, threads, shared, stream] = found
        return found

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


class Params(local):
    """Arguments of a launch as the driver takes them: an array of addresses, one for each.

    A driver has copied them when a launch returns, so a thread needs room for those of one.
    """

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}

    def put(self, args: "tuple[Tensor | Pointer | int | None, ...]") -> int:
        """Lay them out, eight bytes each: of C ints a driver reads the lower four.

        Returns:
            the array's address, good until the thread's next call.
        """
        room = self._rooms.get(len(args))
        if room is None:
            room = self._room(len(args))
        pack_into, values, address, _ = room
        # a launch has a dozen arguments, and nearly all are one of these: a call for each is slow
        pack_into(
            values,
            0,
            *[
                arg.data_ptr()
                if type(arg) is Tensor  # asking isinstance() of a tensor is slow
                else (arg if type(arg) is int else _value(arg))
                for arg in args
            ],
        )
        return address

    def _room(self, num: int) -> Room:
        values, addresses = (ctypes.c_int64 * num)(), (ctypes.c_uint64 * num)()
        for place in range(num):
            addresses[place] = ctypes.addressof(values) + 8 * place
        room = Struct(f"{num}q").pack_into, values, ctypes.addressof(addresses), addresses
        self._rooms[num] = room
        return room


def _value(arg: "Tensor | Pointer | int | None") -> int:
    if isinstance(arg, Pointer):
        return arg.address
    return arg.data_ptr() if isinstance(arg, Tensor) else int(arg or 0)


_PARAMS = Params()  # room, not state: nothing is kept from one launch to the next


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
