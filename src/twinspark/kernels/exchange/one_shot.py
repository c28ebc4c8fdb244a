"""The sum of two ranks' partials over peer memory: GPUs of one host that reach each other.

An alternative to a library's all-gather for `twinspark bench pair` to measure; models do not use
it. The arithmetic is in one_shot.cu. Letters: T rows, D hidden. Read next: `bench/exchange.py`,
`kernels/cuda/launch.py`.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import CudaModule, Pointer, num_processors

SOURCE = Path(__file__).with_name("one_shot.cu")
MOST_BLOCKS = 64
HANDLE_BYTES = 64

_THREADS = 512
_VECTOR_BYTES = 16
_FLAG_BYTES = 4 * MOST_BLOCKS


@dataclass(frozen=True)
class Mailbox:
    """Where another rank puts its partials: two buffers in turn, then a flag a block.

    Attributes:
        address: of the memory, as this process sees it.
        room: bytes of one buffer, a multiple of 16.
    """

    address: int
    room: int

    @property
    def flags(self) -> Pointer:
        """Of the blocks, 0 at first."""
        return Pointer(self.address + 2 * self.room)


def make_mailbox(device: torch.device, room: int) -> tuple[Mailbox, bytes]:
    """Memory on a device that another process can open, and what that process needs for it.

    It is this rank's until the process ends: the other one may still be writing.

    Raises:
        ValueError: the room is no multiple of 16 bytes.
        RuntimeError: the driver refused.
    """
    if room % _VECTOR_BYTES or room <= 0:
        raise ValueError(f"a mailbox has a multiple of {_VECTOR_BYTES} bytes, not {room}")
    driver = _driver(device)
    size = 2 * room + _FLAG_BYTES
    with torch.cuda.device(device):
        address = _checked(driver.cuMemAlloc(size))
        _checked(driver.cuMemsetD8(address, 0, size))
        torch.cuda.synchronize()
        handle = _checked(driver.cuIpcGetMemHandle(address))
    return Mailbox(int(address), room), ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def open_mailbox(device: torch.device, handle: bytes, room: int) -> Mailbox:
    """Another process's mailbox as `device` reaches it.

    Raises:
        RuntimeError: the devices do not reach each other's memory.
    """
    driver = _driver(device)
    found = driver.CUipcMemHandle()
    ctypes.memmove(found.getPtr(), handle, HANDLE_BYTES)
    lazily = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    with torch.cuda.device(device):
        return Mailbox(int(_checked(driver.cuIpcOpenMemHandle(found, lazily))), room)


class OneShot:
    """One rank's end of an exchange of two."""

    def __init__(self, device: torch.device, own: Mailbox, other: Mailbox) -> None:
        """Take both mailboxes, of equal room; nobody else may use them."""
        assert own.room == other.room, "mailboxes of one size"
        self._own, self._other = own, other
        self._turns = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)
        self._blocks = min(MOST_BLOCKS, num_processors(device.index))
        torch.cuda.synchronize(device)

    def sum(self, mine_TD: Tensor) -> Tensor:
        """Both ranks' rows added in fp32 and rounded to bf16, the same bits on both: [T, D].

        Every rank calls it equally often, with equal shapes. Nothing is waited for on the host.

        Args:
            mine_TD: bf16, contiguous; their bytes a multiple of 16 that fits the mailbox.
        """
        size = mine_TD.numel() * mine_TD.element_size()
        if mine_TD.dtype != torch.bfloat16 or not mine_TD.is_contiguous():
            raise ValueError("an exchange takes contiguous bf16 rows")
        if size % _VECTOR_BYTES or size > self._own.room:
            raise ValueError(f"{size} bytes do not fit a mailbox of {self._own.room}")
        out_TD = torch.empty_like(mine_TD)
        args = (
            mine_TD, out_TD, Pointer(self._own.address), Pointer(self._other.address),
            self._own.flags, self._other.flags, self._turns,
            size // _VECTOR_BYTES, self._own.room // _VECTOR_BYTES,
        )  # fmt: skip
        with torch.cuda.device(mine_TD.device):
            module = _module(mine_TD.device.index)
            module.launch("exchange_one_shot", (self._blocks, 1, 1), _THREADS, args)
        return out_TD


def cuda_variants() -> Iterator[tuple[Path, dict[str, int]]]:
    """What is compiled: (source, macros). The file is named "one_shot.cu"."""
    yield SOURCE, {}


@cache
def _module(index: int) -> CudaModule:
    return CudaModule(SOURCE, index, {})


def _driver(device: torch.device) -> Any:
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context is current now
    return import_module("cuda.bindings.driver")


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return values[0] if values else None
