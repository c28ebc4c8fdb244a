"""Which device a model runs on. Read next: `loading.py`, `config/engine.py`."""

import logging

import torch

from twinspark.errors import ConfigError
from twinspark.kernels.cuda.launch import why_not_launch

logger = logging.getLogger(__name__)


def choose_device(wanted: str, *, ranks: int = 1) -> torch.device:
    """The device that a setting means on this machine.

    Args:
        wanted: "cpu", "cuda", "cuda:N" or "auto", which is the first CUDA device that our kernels
            run on, else the CPU.
        ranks: processes the model is spread over; several of them run on CPUs only.

    Raises:
        ConfigError: a CUDA device was asked for by name and cannot be used; the text says why.
    """
    if wanted == "cpu" or (wanted == "auto" and ranks > 1):
        return torch.device("cpu")
    device = torch.device("cuda", _number(wanted))
    if (reason := _why_not(device, ranks)) is None:
        return device
    if wanted != "auto":
        raise ConfigError(f"device is {wanted!r}, but {reason}")
    if torch.cuda.is_available():
        logger.warning("using the CPU: %s", reason)
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """What a CUDA device calls itself; empty for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _number(wanted: str) -> int:
    return int(wanted.partition(":")[2] or 0) if wanted != "auto" else 0


def _why_not(device: torch.device, ranks: int) -> str | None:
    if ranks > 1:
        return "several ranks run on CPUs only"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    if (count := torch.cuda.device_count()) <= (device.index or 0):
        return f"this machine has {count} CUDA devices, numbered from 0"
    reason = why_not_launch(device)
    return None if reason is None else f"our kernels do not run there: {reason}"
