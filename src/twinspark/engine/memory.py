"""Memory that admission may count on: read on every rank, priced before it is taken.

Knows bytes, not requests. A price is what the smallest step of a prompt needs; larger steps are
only made while there is room for them, and never change a bit. Read next: `admission.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twinspark.config.model import ModelConfig

READ_GAP_S = 0.1
"""Figures younger than this are used again."""

INDEX_POSITIONS = 32768
"""Prompts of this length or more fill the scratch memory of index scores."""

_FLOAT_BYTES = 4


class MemoryMeter(Protocol):
    """Reads how much memory each rank could still take."""

    def usable(self) -> Sequence[int | None]:
        """Bytes by rank; None where it is not known or the figure is too old."""


class LocalMemory:
    """This machine: what Linux calls available, and what the control group leaves, if less."""

    def __init__(
        self, *, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
    ) -> None:
        """Read these places, each time anew."""
        self._meminfo = meminfo
        self._cgroup = cgroup

    def usable(self) -> Sequence[int | None]:
        """One rank's figure; None where the machine does not say."""
        available = _field(self._meminfo, "MemAvailable:")
        if available is None:
            return [None]
        available *= 1024  # the file counts KiB
        limit = _number(self._cgroup / "memory.max")
        used = _number(self._cgroup / "memory.current")
        if limit is not None and used is not None:
            reclaimable = _field(self._cgroup / "memory.stat", "inactive_file") or 0
            available = min(available, max(limit - used + reclaimable, 0))
        return [available]


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" means no limit
        return None


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """What prompt rows take for the time of a step.

    Attributes:
        row_bytes: of one row.
        scratch_bytes: index scores of a long prompt.
        least_rows: rows of the smallest step.
    """

    row_bytes: int
    scratch_bytes: int
    least_rows: int

    def of(self, rows: int, positions: int) -> int:
        """Bytes for a step of so many rows of a prompt that ends at `positions`."""
        part = min(positions, INDEX_POSITIONS) / INDEX_POSITIONS
        return self.row_bytes * rows + round(self.scratch_bytes * part)


def row_bytes(config: ModelConfig) -> int:
    """An upper estimate of what one prompt row holds at the widest place of a layer, in fp32.

    The copies of the residual stream and their update, queries and attention output, the gathered
    rows of the attention list, and the inner rows of the active experts.
    """
    stream = 3 * config.hc_mult * config.hidden_size
    heads = 2 * config.num_attention_heads * config.head_dim
    gathered = (config.index_topk + config.sliding_window) * config.head_dim
    active = config.num_experts_per_tok + config.n_shared_experts
    experts = active * (3 * config.moe_intermediate_size + config.hidden_size)
    return _FLOAT_BYTES * (stream + heads + gathered + experts)


class MemoryRule:
    """Whether a prompt fits, and how many of its rows a step may have.

    Attributes:
        price: of prompt rows.
    """

    def __init__(
        self, meter: MemoryMeter, price: StepPrice, *, target_bytes: int, floor_bytes: int
    ) -> None:
        """Fix the limits.

        Args:
            meter: asked at most every READ_GAP_S.
            price: of prompt rows.
            target_bytes: stays usable on every rank after a prompt was priced; 0 prices nothing.
            floor_bytes: under it nothing is admitted; 0 is off.
        """
        self.price = price
        self._meter = meter
        self._target = target_bytes
        self._floor = floor_bytes
        self._read_s: float | None = None
        self._usable: tuple[int, ...] = ()
        self._last_rows = 0

    def usable(self, now_s: float) -> tuple[int, ...]:
        """Usable bytes by rank; an unknown figure counts as none."""
        if self._read_s is None or now_s - self._read_s >= READ_GAP_S:
            self._usable = tuple(figure or 0 for figure in self._meter.usable())
            self._read_s = now_s
        return self._usable

    def fits(self, left: int, positions: int, *, reserved: int, now_s: float) -> bool:
        """Whether a prompt with `left` rows to run may be admitted.

        Args:
            left: prompt rows to run.
            positions: where the prompt ends.
            reserved: bytes priced for prompts that were admitted and have not run yet.
            now_s: on the engine's clock.
        """
        usable = min(self.usable(now_s), default=0)
        if usable < self._floor:
            return False
        need = self.price.of(min(left, self.price.least_rows), positions) if left else 0
        return not self._target or usable - reserved - need >= self._target

    def rows(self, most: int, positions: int, *, now_s: float) -> int:
        """The largest of most, most / 2, ... down to the smallest step that leaves the target.

        Going up again takes a tenth of the target more than staying.
        """
        if not self._target:
            return most
        room = min(self.usable(now_s), default=0) - self._target
        rows = most
        while rows // 2 >= self.price.least_rows:
            margin = self._target // 10 if rows > self._last_rows > 0 else 0
            if self.price.of(rows, positions) + margin <= room:
                break
            rows //= 2
        self._last_rows = rows
        return rows
