"""What the host does between two recorded rounds, measured without a device.

The engine's path for recorded rounds runs whole, on CPU tensors: plans, staged numbers, Engram
rows, copies, draft passes that follow their round, choosing, delivery. The time of what a device
would run is left out, and a model that does nothing runs there. The figure that counts is how long
a device would have nothing to do: from its last result to the replay of the next round. Launches
and copies cost more with a device than here. Read next: `overhead.py`, `engine/rounds.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twinspark.bench.overhead import (
    CallClock,
    NullModel,
    decode_in_all_slots,
    decoding_config,
    percentile,
)
from twinspark.cache.view import Caches
from twinspark.config.paths import demo_pack_path
from twinspark.engine.core import Engine
from twinspark.engine.lookup import MAX_COPY
from twinspark.engine.plan import PlannedRows
from twinspark.engine.recording import Recorded, Work
from twinspark.engine.rounds import Rounds
from twinspark.model.loading import load_model
from twinspark.model.transformer import Transformer
from twinspark.pack.reader import open_pack
from twinspark.text.tokenizer import Tokenizer

SLOTS = (1, 4)
NUM_DRAFTS = 5
_COUNTED = 10  # rounds whose operations are counted


@dataclass(frozen=True, kw_only=True)
class RoundHost:
    """The host's part of a round in which `slots` requests decode with drafts.

    Times are processor time of the engine's thread in microseconds, without what a device runs.

    Attributes:
        slots: requests.
        lookup: whether drafts are copied from the text; else a draft pass proposes them.
        rows: of each request's window.
        rounds: measured.
        idle_us: median from a device's last result to the replay of the next round.
        idle_p99_us: its 99th percentile.
        step_us: median of all of `Engine.step`.
        torch_calls: operations on tensors a round, copies included.
        copies: copies between host and device a round, beside those that are recorded.
        waits: times a round that the host waits for a device.
    """

    slots: int
    lookup: bool
    rows: int
    rounds: int
    idle_us: float
    idle_p99_us: float
    step_us: float
    torch_calls: float
    copies: float
    waits: float


class NullRounds(NullModel):
    """A model whose rounds are answered by `_Device`; its Engram rows and caches are real.

    Attributes:
        token: what follows everything.
    """

    walks_on_device = has_draft = True
    device = torch.device("cpu")

    def __init__(self, model: Transformer, *, token: int) -> None:
        super().__init__(model.config, token=token)
        self._model = model
        self.engram_fields = model.engram_fields
        self.token = token

    def new_caches(self, num_slots: int, max_tokens: int, **options: Any) -> Any:
        """Real ones."""
        return self._model.new_caches(num_slots, max_tokens, **options)

    def put_engram(self, rows: Sequence[PlannedRows], into: Sequence[npt.NDArray[Any]]) -> None:
        """The rows of the pack."""
        self._model.put_engram(rows, into)


class _Device:
    """Answers recorded work at once, and sums how long it would have had nothing to do."""

    def __init__(self, model: NullRounds) -> None:
        self.clock = model.clock
        self.idle_ns = self.waits = 0
        self._model = model
        self._free_since: int | None = None

    def run(self, caches: Caches) -> Rounds:
        """Rounds that are recorded here; every choice and every draft is the model's token."""
        self._rounds: Any = Rounds(cast(Any, self._model), caches, recorder=self)
        self._rounds._chosen.array.fill(self._model.token)
        drafts: npt.NDArray[np.int32] = self._rounds._drafted.array
        drafts[:, 1:] = self._model.token
        drafts[:, 2 + self._model.config.dspark_block_size :].view(np.float32).fill(4.0)
        landing: Any
        for landing in (self._rounds._chosen, self._rounds._drafted):
            landing.wait = self._watched(landing.wait)
        rounds: Rounds = self._rounds
        return rounds

    def record(self, work: Work) -> Recorded:
        """See `Recorder`."""
        return _Answers(self, cast(Any, work).func.__name__, cast(Any, work).args[0])

    def answer(self, name: str, size: int) -> tuple[Tensor, ...]:
        """What a device would leave behind that is not there yet."""
        if name == "_decode":
            return (self._model.logits_V.expand(size, -1),)
        assert name in ("_draft_followers", "_draft_given"), f"the bench has no answer to {name}"
        inputs, drafts = self._rounds._inputs, self._rounds._drafted.array
        inputs.requests_part.bring()
        torch.add(
            inputs.positions_n[:size],
            inputs.counts_n[:size],
            out=torch.from_numpy(drafts)[:size, 0],
        )
        return ()

    def begin(self) -> None:
        """Something is replayed."""
        if self._free_since is not None:
            self.idle_ns += thread_time_ns() - self._free_since
        self._free_since = None

    def _watched(self, wait: Callable[[], None]) -> Callable[[], None]:
        """Idle time begins with the last wait before a replay."""

        def waiting() -> None:
            wait()
            self.waits += 1
            self._free_since = thread_time_ns()

        return waiting


class _Answers:
    """Recorded work of `_Device`."""

    def __init__(self, device: _Device, name: str, size: int) -> None:
        self._device, self._args = device, (name, size)
        self._answer = device.clock.wrap(device.answer)

    def replay(self) -> tuple[Tensor, ...]:
        """See `Recorded`."""
        self._device.begin()
        return cast(tuple[Tensor, ...], self._answer(*self._args))


class _TorchCalls(TorchFunctionMode):
    """Counts operations on tensors, and copies among them, outside of what a device runs."""

    def __init__(self, clock: CallClock) -> None:
        super().__init__()
        self.calls = self.copies = 0
        self._clock = clock

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._clock.is_inside:
            self.calls += 1
            self.copies += func is Tensor.copy_
        return func(*args, **(kwargs or {}))


def measure_round_hosts() -> list[RoundHost]:
    """With drafts of passes, then with copies, at every number of `SLOTS`."""
    return [measure_round_host(slots=n, lookup=lookup) for lookup in (False, True) for n in SLOTS]


def measure_round_host(*, slots: int, lookup: bool = False, rounds: int = 200) -> RoundHost:
    """Decode in all slots with drafts that are all kept, with the sizes of the demo pack.

    Args:
        slots: requests, all from the same round on.
        lookup: whether drafts are copied from the text, as many as are ever copied, instead of a
            draft pass's.
        rounds: to time; ten more are counted.
    """
    engine, device = _engine(slots, lookup=lookup)
    idle: list[float] = []
    steps: list[float] = []
    waits = device.waits
    for _ in range(rounds):
        device.clock.take_us()
        device.idle_ns = 0
        began = thread_time_ns()
        engine.step()
        steps.append((thread_time_ns() - began) / 1000 - device.clock.take_us())
        idle.append(device.idle_ns / 1000)
    waits = device.waits - waits
    with _TorchCalls(device.clock) as counted:
        for _ in range(_COUNTED):
            engine.step()
    status = engine.status
    assert status.running == slots, "a request of the bench ended early"
    assert status.accepted_at == status.drafted_at, "a draft of the bench was refused"
    return RoundHost(
        slots=slots,
        lookup=lookup,
        rows=1 + (MAX_COPY if lookup else NUM_DRAFTS),
        rounds=rounds,
        idle_us=statistics.median(idle),
        idle_p99_us=percentile(idle, 0.99),
        step_us=statistics.median(steps),
        torch_calls=counted.calls / _COUNTED,
        copies=counted.copies / _COUNTED,
        waits=waits / rounds,
    )


def _engine(slots: int, *, lookup: bool) -> tuple[Engine, _Device]:
    """An engine past its first rounds, all slots decoding."""
    pack = open_pack(demo_pack_path(), verify=False)
    tokenizer = Tokenizer.from_file(pack.tokenizer_path)
    (token,) = tokenizer.encode_plain("a")
    model = NullRounds(load_model(pack), token=token)
    config = decoding_config(slots, lookup=lookup, draft_tokens=None if lookup else NUM_DRAFTS)
    engine = Engine(model, tokenizer, config)
    runner, device = cast(Any, engine._runner), _Device(model)
    runner._rounds = device.run(runner.caches)
    decode_in_all_slots(engine, slots, token)
    return engine, device
