"""Collectives between processes: torch.distributed's gloo on CPUs, NCCL on GPUs (decision 14).

Only one collective is used, an all-gather of bytes; sums are taken locally, so a transport cannot
change a bit. The group is an object, not torch's global one. Read next: `collectives.py`.
"""

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

# torch ships no types for its groups and stores
_dist: Any = torch.distributed

SET_UP_S = 60.0
GATHER_S = 24 * 3600.0
"""Longest wait inside a collective. Dead ranks are found by the fate link, not by this."""


class ProcessRank:
    """This process's place in a group of processes.

    Attributes:
        rank: this process, 0-based.
        size: number of processes.
    """

    def __init__(
        self, rank: int, size: int, group: Any, *, failed: Callable[[Exception], Exception]
    ) -> None:
        """Take a process group of torch; `failed` names the cause of a broken collective."""
        self.rank = rank
        self.size = size
        self._group = group
        self._failed = failed

    def gather_shards(
        self, parts: Sequence[Tensor], *, widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """All virtual shards in shard order; see `Collectives`.

        Raises:
            RankFailed: a rank is gone.
        """
        each = len(parts)
        if widths is None:
            stacked = parts[0][None] if each == 1 else torch.stack(list(parts))
            return [part for own in self.gather_ranks(stacked) for part in own.unbind(0)]
        assert len(widths) == each * self.size, "one width a shard of all ranks"
        widest = max(widths)
        # narrower shards travel padded: a collective needs equal shapes
        buffer = parts[0].new_zeros((each, *parts[0].shape[:-1], widest))
        for place, part in zip(buffer, parts, strict=True):
            place[..., : part.shape[-1]] = part
        found = [part for own in self.gather_ranks(buffer) for part in own.unbind(0)]
        return [part[..., :width] for part, width in zip(found, widths, strict=True)]

    def gather_ranks(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order; all have one shape and dtype.

        Raises:
            RankFailed: a rank is gone.
        """
        if tensor.numel() == 0:
            return [tensor.clone() for _ in range(self.size)]
        mine = tensor.contiguous()
        flat = mine.view(-1).view(torch.uint8)
        found = [torch.empty_like(flat) for _ in range(self.size)]
        try:
            self._group.allgather([found], [flat]).wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        return [part.view(mine.dtype).view(mine.shape) for part in found]


def make_store(host: str) -> tuple[Any, int]:
    """Rank 0's key-value store on a free port of this address, through which groups are set up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(64)
    port = int(listener.getsockname()[1])
    store = _dist.TCPStore(
        host, port, None, True, timedelta(seconds=SET_UP_S), False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def open_store(address: tuple[str, int]) -> Any:
    """Another rank's way to rank 0's store."""
    return _dist.TCPStore(*address, None, False, timedelta(seconds=SET_UP_S), False)


def make_group(
    store: Any,
    rank: int,
    size: int,
    *,
    local_host: str,
    device: str = "cpu",
    failed: Callable[[Exception], Exception],
) -> ProcessRank:
    """Connect all ranks to each other.

    Args:
        store: rank 0's, as each rank sees it.
        rank: this process.
        size: number of processes.
        local_host: this machine's address on the way to rank 0; the network interface follows
            from it, whatever its name.
        device: "cpu" is gloo, "cuda" is NCCL.
        failed: names the cause of a broken collective.

    Raises:
        RankFailed: a rank could not be reached.
    """
    store.set_timeout(timedelta(seconds=SET_UP_S))
    try:
        if device == "cuda":
            options = _dist.ProcessGroupNCCL.Options()
            group = _dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = _dist.ProcessGroupGloo._Options()
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=local_host)]
            options._timeout = timedelta(seconds=GATHER_S)
            group = _dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise failed(error) from error
    return ProcessRank(rank, size, group, failed=failed)
