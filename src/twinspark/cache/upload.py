"""Tensors on their way between host and device.

A step plans its rows with numpy; what a device reads of that goes over in one pinned buffer, so a
plan costs one copy and no synchronization. Read next: `plan.py`.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 16
_MOST_PINNED_BYTES = 64 << 20

Plan = TypeVar("Plan", bound=Any)


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors on `device`, which are themselves where that is the CPU.

    Args:
        tensors: any shapes and dtypes.
        device: where they are read.
    """
    if device.type == "cpu":
        return list(tensors)
    # the allocator of pinned memory hands a block out again only when its copies are over
    packed = pack_bytes(tensors, pin=device.type == "cuda")
    return unpack_bytes(packed.to(device, non_blocking=True), tensors)


def download(tensor: Tensor) -> Tensor:
    """A tensor in host memory, which is itself where that is where it is."""
    if not tensor.is_cuda or tensor.numel() * tensor.element_size() > _MOST_PINNED_BYTES:
        return tensor.cpu()
    # into pinned memory it goes several times as fast; what was pinned stays so
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    held.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return held


def upload_plan(plan: Plan, device: torch.device) -> Plan:
    """A frozen dataclass of host tensors with all of them on `device`, in one copy."""
    if device.type == "cpu":
        return plan
    names = [field.name for field in fields(plan)]
    found = upload([getattr(plan, name) for name in names], device)
    return replace(plan, **dict(zip(names, found, strict=True)))


def pack_bytes(tensors: Sequence[Tensor], *, pin: bool = False) -> Tensor:
    """Copies of host tensors one after another, uint8, each from a multiple of 16 bytes on."""
    size = sum(_room(tensor) for tensor in tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    for place, tensor in zip(unpack_bytes(buffer, tensors), tensors, strict=True):
        place.copy_(tensor)
    return buffer


def unpack_bytes(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a packed buffer, views with the dtypes and shapes of `like`."""
    found, start = [], 0
    for tensor in like:
        part = buffer[start : start + tensor.numel() * tensor.element_size()]
        found.append(part.view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
