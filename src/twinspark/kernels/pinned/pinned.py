"""Numbers of a round on their way between pinned memory and a device, each way in one launch.

A copy by a copy engine costs the host a call of its own, and the device twice a hand-over between
engines; a kernel is a node of the captured graph like all the others. The memory must come from
the allocator of pinned memory: a device knows it by the address that the host has for it. On a CPU
both are plain copies. Read next: pinned.cu, `cache/staging.py`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinspark.kernels.cuda.launch import CudaModule

SOURCE = Path(__file__).with_name("pinned.cu")
VECTOR_BYTES = 16
_BRING_THREADS, _LAND_THREADS = 64, 256  # few a block: reads spread over many multiprocessors


def bring(host: Tensor, device: Tensor) -> None:
    """Copy bytes to a device. The host must not write them before what follows has a result.

    Unlike after a copy, kernels that may start early must wait for those ahead before they read
    the bytes: in rounds they do, in the machine code too (2026-11-30, sm_90a and sm_121).

    Args:
        host: uint8 [N], pinned where the other is on a CUDA device; N and both addresses are
            multiples of 16.
        device: uint8 [N].
    """
    if host.shape != device.shape or host.dtype != torch.uint8 or device.dtype != torch.uint8:
        raise ValueError(
            f"expected as many bytes here as there, there are {host.dtype} {tuple(host.shape)} "
            f"and {device.dtype} {tuple(device.shape)}"
        )
    if not device.is_cuda:
        device.copy_(host)
        return
    if any(n % VECTOR_BYTES for n in (len(host), host.data_ptr(), device.data_ptr())):
        raise ValueError(f"{len(host)} bytes at {host.data_ptr()}: not in vectors of 16 bytes")
    count = len(host) // VECTOR_BYTES
    if count:
        grid = (-(-count // _BRING_THREADS), 1, 1)
        _module(device.device.index).launch("bring", grid, _BRING_THREADS, (host, device, count))


def land(found: Tensor, device: Tensor, host: Tensor) -> None:
    """Copy results to where a device reads them next, and to where the host does.

    Args:
        found: int32, contiguous.
        device: int32, contiguous, of the same shape and on the same device.
        host: the same, pinned where the others are on a CUDA device. The host reads it once an
            event behind this has come.
    """
    for name, tensor in (("found", found), ("device", device), ("host", host)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.shape != found.shape:
            raise ValueError(
                f"{name} must be contiguous int32 {tuple(found.shape)}, it is {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if not device.is_cuda:
        device.copy_(found)
        host.copy_(found)
        return
    if found.numel():
        args = (found, device, host, found.numel())
        _module(device.device.index).launch("land", (1, 1, 1), _LAND_THREADS, args)


def cuda_variants() -> Iterator[tuple[Path, dict[str, int]]]:
    """What every model compiles: (source, macros)."""
    yield SOURCE, {}


@cache
def _module(index: int) -> CudaModule:
    return CudaModule(SOURCE, index, {})
