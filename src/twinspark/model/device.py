"""Which device a model runs on. Read next: `loading.py`, `config/engine.py`."""

import logging

import torch
import torch.distributed

from twinspark.errors import ConfigError
from twinspark.kernels.cuda.launch import why_not_launch

logger = logging.getLogger(__name__)


def choose_device(wanted: str, *, ranks: int = 1) -> torch.device:
    """The device that a setting means on this machine.

    Args:
        wanted: "cpu", "cuda", "cuda:N" or "auto", which is the first CUDA device that our kernels
            run on, else the CPU.
        ranks: that run on this machine, each on a device of its own: this one and those after it.

    Raises:
        ConfigError: a CUDA device was asked for by name and cannot be used; the text says why.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", _number(wanted))
    if (reason := _why_not(device, ranks)) is None:
        return device
    if wanted != "auto":
        raise ConfigError(f"device is {wanted!r}, but {reason}")
    if torch.cuda.is_available():
        logger.warning("using the CPU: %s", reason)
    return torch.device("cpu")


def device_of_rank(first: torch.device, rank: int) -> torch.device:
    """Where a rank of this machine runs, whose rank 0 runs on `first`."""
    return first if first.type == "cpu" else torch.device("cuda", (first.index or 0) + rank)


def device_kind(device: torch.device) -> str:
    """What ranks must have in common, as bits are promised for equal devices only."""
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device_name(device)}, compute capability {major}.{minor}"


def device_name(device: torch.device) -> str:
    """What a CUDA device calls itself; empty for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _number(wanted: str) -> int:
    return int(wanted.partition(":")[2] or 0) if wanted != "auto" else 0


def _why_not(device: torch.device, ranks: int) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    first, count = device.index or 0, torch.cuda.device_count()
    if count <= first:
        return f"this machine has {count} CUDA devices, numbered from 0"
    if count < first + ranks:
        return (
            f"{ranks} ranks need a CUDA device each from {first} on, and this machine has {count}; "
            "start each rank by hand where its device is (--rank and --rendezvous), or use "
            "--device cpu"
        )
    for number in range(first, first + ranks):
        if (reason := why_not_launch(torch.device("cuda", number))) is not None:
            return f"our kernels do not run on device {number}: {reason}"
    if ranks > 1 and not torch.distributed.is_nccl_available():
        return "this torch has no NCCL, which ranks on GPUs need; install a CUDA build for Linux"
    return None
