"""Memory through which the numbers of a round reach a device, and its results come back.

What a recorded round reads and writes stays where it is, so it is allocated once: a pinned buffer
with its twin on the device, and arrays and tensors that are views of the two. Numbers are written
in place with numpy and sent in one copy; results are fetched in one. Read next:
`engine/rounds.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
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
        tensor: where the device reads them after `Part.send`.
    """

    array: npt.NDArray[Any]
    tensor: Tensor


@dataclass(frozen=True)
class Part:
    """The first bytes of a staging buffer, here and there."""

    host: Tensor
    device: Tensor

    def send(self) -> None:
        """Copy them to the device, in stream order; nothing is waited for."""
        self.device.copy_(self.host, non_blocking=True)


class Staging:
    """A buffer on the host with its twin on a device.

    The host must not write before what was sent last was read, which it knows once it holds a
    result that came from it.
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
        self._bytes = self._host.numpy()

    def cut(self, start: int = 0) -> "Cutter":
        """Fields one after another from byte `start` on; others may lie there already."""
        return Cutter(self, start)

    def part(self, end: int) -> Part:
        """The bytes before `end`."""
        return Part(self._host[:end], self._device[:end])

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
    """A tensor on a device with its twin on the host.

    Attributes:
        tensor: where the device writes.
        array: where the host reads after `fetch` and `wait`.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        """Zeros, int32 [num_rows, width]."""
        is_cuda = device.type == "cuda"
        shape = (num_rows, width)
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self.array: npt.NDArray[np.int32] = self._host.numpy()
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._arrived = torch.Event(device) if is_cuda else None
        self._written = torch.Event(device) if is_cuda else None
        self._aside: torch.cuda.Stream | None = None
        if is_cuda:
            self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, count: int, *, aside: bool = False) -> None:
        """Begin to copy the first `count` rows to the host, in stream order.

        Args:
            count: rows.
            aside: beside what comes next in the stream, which then need not wait for the copy. It
                must not write these rows, and `wait` must come before something does.
        """
        if count not in self._pairs:
            self._pairs[count] = (self._host[:count], self.tensor[:count])
        if not aside or self._aside is None:
            self._copy(count)
            return
        assert self._written is not None
        self._written.record()
        with torch.cuda.stream(self._aside):
            self._written.wait()
            self._copy(count)

    def _copy(self, count: int) -> None:
        host, device = self._pairs[count]
        host.copy_(device, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        """Until what was fetched last is there."""
        if self._arrived is not None:
            self._arrived.synchronize()


def room(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of a field, and where the next one may begin."""
    size = int(np.prod(shape)) * dtype.itemsize
    return size, -(-size // _ALIGNMENT) * _ALIGNMENT
