"""A training run on disk: saved whole or not at all, restored bit for bit.

Owns the file only; what is in it belongs to `backbone.py` and `train_draft.py`.
"""

import os
import pathlib
from typing import Any

import torch
from torch import Tensor


def save_state(path: pathlib.Path, state: dict[str, Any]) -> None:
    """Writes `state` beside `path`, flushes it, and puts it in place in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def load_state(path: pathlib.Path, device: str) -> dict[str, Any]:
    """Reads what save_state wrote; tensors arrive on `device`.

    Raises:
        FileNotFoundError: there is no such run.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no saved run to resume; start without --resume")
    found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return found


def plain(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without their gradients' history."""
    return {name: tensor.detach() for name, tensor in params.items()}
