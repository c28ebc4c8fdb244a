"""Collectives between processes: torch.distributed's gloo on CPUs, NCCL on GPUs (decision 14).

Only one collective is used, an all-gather of bytes; sums are taken locally, so a transport cannot
change a bit. The group is an object, not torch's global one. Read next: `collectives.py`,
`nccl.py`.
"""

import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from twinspark.distributed.nccl import abort_group, check_apart, make_nccl, warm_up

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
        self,
        rank: int,
        size: int,
        group: Any,
        *,
        failed: Callable[[Exception], Exception],
        abort: Callable[[], threading.Thread | None] = lambda: None,
    ) -> None:
        """Take a process group of torch.

        Args:
            rank: this process.
            size: number of processes.
            group: of torch, with `_allgather_base`.
            failed: names the cause of a broken collective.
            abort: frees whoever waits in a collective of the group, which is of no use afterwards.
                It returns at once, and is called once; what it gives is at it.
        """
        self.rank = rank
        self.size = size
        self._aborting: threading.Thread | None = None

        def begin() -> None:
            self._aborting = abort()

        self.abort = once(begin)
        self._group = group
        self._failed = failed
        self._rehearses = False
        self._options = _dist.distributed_c10d.AllgatherOptions()
        # on the current stream, so that nothing but the exchange is in a recording
        self._options.asyncOp = False

    @property
    def torch_group(self) -> Any:
        """The process group of torch, for benches of what we do not use."""
        return self._group

    def wait_aborted(self, timeout_s: float) -> bool:
        """Until what `abort` began is done, if it was called; whether it is."""
        if self._aborting is not None:
            self._aborting.join(timeout_s)
        return self._aborting is None or not self._aborting.is_alive()

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
            return list(self.gather_stack(stacked).unbind(0))
        assert len(widths) == each * self.size, "one width a shard of all ranks"
        widest = max(widths)
        # narrower shards travel padded: a collective needs equal shapes
        buffer = parts[0].new_zeros((each, *parts[0].shape[:-1], widest))
        for place, part in zip(buffer, parts, strict=True):
            place[..., : part.shape[-1]] = part
        found = self.gather_stack(buffer).unbind(0)
        return [part[..., :width] for part, width in zip(found, widths, strict=True)]

    def gather_stack(self, parts_S: Tensor) -> Tensor:
        """All virtual shards, [V, ...], of this rank's [S, ...]; see `Collectives`.

        Raises:
            RankFailed: a rank is gone.
        """
        return self._gather(parts_S).flatten(0, 1)

    def gather_ranks(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order; all have one shape and dtype.

        Raises:
            RankFailed: a rank is gone.
        """
        return list(self._gather(tensor).unbind(0))

    @contextmanager
    def rehearsal(self) -> Generator[None]:
        """While open, this rank's part stands in every rank's place; see `Collectives`."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def _gather(self, tensor: Tensor) -> Tensor:
        """[ranks, ...] in rank order."""
        mine = tensor.contiguous()
        found = mine.new_empty((self.size, *mine.shape))
        if mine.numel() == 0:
            return found
        if self._rehearses:
            return found.copy_(mine.expand_as(found))
        flat, into = (t.view(-1).view(torch.uint8) for t in (mine, found))
        try:
            work = self._group._allgather_base(into, flat, self._options)
            if work is not None:  # a stream is waited for by itself
                work.wait()
        except RuntimeError as error:
            if mine.is_cuda and torch.cuda.is_current_stream_capturing():
                raise  # nobody was met: it is about the recording, not about another rank
            raise self._failed(error) from error
        return found


def once(work: Callable[[], None]) -> Callable[[], None]:
    """Work that is done by the first call only, whatever thread makes it."""
    lock = threading.Lock()

    def call() -> None:
        if lock.acquire(blocking=False):  # and never released
            work()

    return call


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
        local_host: this machine's address on the way to rank 0; gloo's network interface follows
            from it, whatever its name. NCCL finds its own (docs/concepts/ranks.md).
        device: where this rank's tensors are: "cpu" is gloo, "cuda:N" is NCCL.
        failed: names the cause of a broken collective.

    Raises:
        RankFailed: a rank could not be reached, or two share a GPU.
    """
    store.set_timeout(timedelta(seconds=SET_UP_S))
    where = torch.device(device)
    try:
        if where.type != "cuda":
            return ProcessRank(rank, size, _make_gloo(store, rank, size, local_host), failed=failed)
        check_apart(store, rank, size, where)
        group = make_nccl(store, rank, size, where, timeout=timedelta(seconds=GATHER_S))
        found = ProcessRank(rank, size, group, failed=failed, abort=lambda: abort_group(group))
        warm_up(found, where)
    except RuntimeError as error:
        raise failed(error) from error
    return found


def _make_gloo(store: Any, rank: int, size: int, local_host: str) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=local_host)]
    options._timeout = timedelta(seconds=GATHER_S)
    return _dist.ProcessGroupGloo(store, rank, size, options)
