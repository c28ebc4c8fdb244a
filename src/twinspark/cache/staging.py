"""Memory through which the numbers of a round reach a device, and its results come back.

What a recorded round reads and writes stays where it is, so it is allocated once: a pinned buffer
with its twin on the device, and arrays and tensors that are views of the two. Numbers are written
in place with numpy; the recorded work itself brings them to the device when it begins, and leaves
its results in both places when it ends, so the host launches nothing but the replay. Read next:
`engine/rounds.py`, `kernels/pinned/pinned.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.kernels.pinned.pinned import VECTOR_BYTES, bring, land

_ALIGNMENT = VECTOR_BYTES
_NUMPY: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.bfloat16: np.int16,  # its bits: numpy has no such numbers
}


@dataclass(frozen=True)
class Field:
    """Numbers of one kind.

    Attributes:
        array: where the host writes them; bf16 as int16.
        tensor: where the device reads them after `Part.bring`.
    """

    array: npt.NDArray[Any]
    tensor: Tensor


@dataclass(frozen=True)
class Part:
    """Bytes of a staging buffer that are read together, here and there."""

    host: Tensor
    device: Tensor

    def bring(self) -> None:
        """Have the device read them, in stream order; may be recorded."""
        bring(self.host, self.device)


class Staging:
    """A buffer on the host with its twin on a device.

    The host must not write a part before work that brings it has ended; `Landing.settle` sees to
    that.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Zeros, with no fields yet.

        Args:
            num_bytes: of all fields, each rounded up to 16.
            device: where the twin is; on a CPU it is a second buffer all the same.
        """
        pinned = device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        _keep_for_stream(self._host, self._device)
        self._bytes = self._host.numpy()

    def cut(self, start: int = 0) -> "Cutter":
        """Fields one after another from byte `start` on; others may lie there already."""
        return Cutter(self, start)

    def part(self, start: int, end: int) -> Part:
        """The bytes from `start` to `end`, where fields begin or end."""
        return Part(self._host[start:end], self._device[start:end])

    def field(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Field:
        """The numbers that begin at a byte."""
        end = start + room(dtype, shape)[0]
        if end > len(self._bytes):
            raise ValueError(f"a field ends at byte {end} of a buffer of {len(self._bytes)}")
        array = self._bytes[start:end].view(_NUMPY[dtype]).reshape(shape)
        return Field(array, self._device[start:end].view(dtype).view(shape))


class Cutter:
    """Cuts a buffer into fields.

    Attributes:
        end: the first byte behind the last field.
    """

    def __init__(self, staging: Staging, start: int) -> None:
        self._staging = staging
        self.end = start

    def field(self, dtype: torch.dtype, *shape: int) -> Field:
        """The next field."""
        found = self._staging.field(self.end, dtype, shape)
        self.end += room(dtype, shape)[1]
        return found


class Landing:
    """A tensor on a device with its twin on the host, both of which work on the device writes.

    Attributes:
        tensor: where the device reads what was put last.
        array: where the host reads it after `mark` and `wait`.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        """Zeros, int32 [num_rows, width]."""
        is_cuda = device.type == "cuda"
        shape = (num_rows, width)
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        _keep_for_stream(self._host, self.tensor)
        self.array: npt.NDArray[np.int32] = self._host.numpy()
        self._arrived = torch.Event(device) if is_cuda else None
        self._is_due = False

    def put(self, rows: Tensor) -> None:
        """Write the first rows, int32 [rows, width], in stream order; may be recorded."""
        count = len(rows)
        land(rows.contiguous(), self.tensor[:count], self._host[:count])

    def mark(self) -> None:
        """What was launched last puts rows, or reads numbers that are written anew next."""
        if self._arrived is not None:
            self._arrived.record()
        self._is_due = True

    def wait(self) -> None:
        """Until the device has come to the mark."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._is_due = False

    def settle(self) -> None:
        """The same where nobody has waited for that: what it reads may be written then."""
        if self._is_due:
            self.wait()


def _keep_for_stream(host: Tensor, device: Tensor) -> None:
    """Have pinned memory become another's only when all that its stream was given is done.

    Its allocator knows of copies, not of kernels: one copy tells it of the stream.
    """
    device.copy_(host, non_blocking=True)


def room(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of a field, and where the next one may begin."""
    size = int(np.prod(shape)) * dtype.itemsize
    return size, -(-size // _ALIGNMENT) * _ALIGNMENT
