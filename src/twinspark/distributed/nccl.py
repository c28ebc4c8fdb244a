"""The body of the collectives on GPUs: NCCL through torch, kept from fighting our own watchdog.

A dead or stopped rank is found by the fate link within `rank_timeout_s`; NCCL's kernels meanwhile
wait on the GPU, and torch's watchdog would let them for minutes or end the process without a
cause. So torch's is switched off, and `abort_group` frees who waits. Read next: `group.py`,
`team.py`.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from twinspark.errors import RankFailed

_dist: Any = torch.distributed

ENVIRONMENT: Mapping[str, str] = {
    # nobody but the fate link says that a rank is dead
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # its record of every collective, with a stack trace each, costs more than the launch
    "TORCH_FR_BUFFER_SIZE": "0",
    # multicast over NVLink gains nothing for two ranks, and some hosts refuse it
    "NCCL_NVLS_ENABLE": "0",
    # ranks record graphs at different times: nothing may need the other rank's help by then
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_GRAPH_REGISTER": "0",
}
"""What is set where the user has not set it otherwise."""

logger = logging.getLogger(__name__)


class Gathers(Protocol):
    """What a warm-up needs of a group."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def gather_ranks(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order."""


def check_apart(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    *,
    card: Callable[[torch.device], str] | None = None,
) -> None:
    """See that every rank has a GPU of its own.

    Args:
        store: of the ranks.
        rank: this process.
        size: number of processes.
        device: this rank's.
        card: names a device so that no two cards of the world share a name.

    Raises:
        RankFailed: two ranks share one.
    """
    mine = (card or card_name)(device)
    store.set(f"card of rank {rank}", mine)
    for other in range(size):
        theirs = mine if other == rank else store.get(f"card of rank {other}").decode()
        if other != rank and theirs == mine:
            first, second = sorted((rank, other))
            raise RankFailed(
                f"ranks {first} and {second} are both on the GPU {mine}; give each its own, such "
                "as --device cuda:0 and --device cuda:1, or let rank 0 start all ranks"
            )


def card_name(device: torch.device) -> str:
    """The identity of a card: its UUID."""
    facts: Any = torch.cuda.get_device_properties(device)
    return str(facts.uuid)


def make_nccl(store: Any, rank: int, size: int, device: torch.device, *, timeout: timedelta) -> Any:
    """A process group of torch over NCCL.

    Raises:
        RankFailed: this torch has no NCCL.
        RuntimeError: as of torch.
    """
    if not hasattr(_dist, "ProcessGroupNCCL"):
        raise RankFailed(
            "this torch was built without NCCL, which ranks on GPUs need; install a CUDA build of "
            "torch for Linux, or use --device cpu"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        return _dist.ProcessGroupNCCL(store, rank, size, options)


def warm_up(group: Gathers, device: torch.device) -> None:
    """Make the connections, which a recording cannot, and see that ranks stand where they say.

    Raises:
        RankFailed: what came is not what was sent.
    """
    mine = torch.full((4096,), group.rank, dtype=torch.int32, device=device)
    found = [set(part.tolist()) for part in group.gather_ranks(mine)]
    wanted = [{rank} for rank in range(group.size)]
    if found != wanted:
        raise RankFailed(
            f"the first exchange between the GPUs of {group.size} ranks gave {found}, expected "
            f"{wanted}; NCCL does not work between these cards (NCCL_DEBUG=INFO says more, "
            "NCCL_P2P_DISABLE=1 goes another way)"
        )


def abort_group(group: Any) -> threading.Thread:
    """Free whoever waits in a collective of an NCCL group, which is of no use afterwards.

    Also its orderly end: torch's destructor of a group that nobody aborted does the same, but in
    the thread that drops it. In a thread of its own, as NCCL first lets its kernels go, which is
    what counts, and then waits until every graph that holds one of them has been destroyed. The
    thread keeps the group until then.

    Returns:
        the thread. A process had better not begin to end before the thread has: Python stops it
        where it comes back from torch, and that is a crash.
    """

    def abort() -> None:
        try:
            group.abort()
        except RuntimeError as error:
            logger.warning("NCCL could not be aborted: %s", error)

    thread = threading.Thread(target=abort, name="abort", daemon=True)
    thread.start()
    return thread
