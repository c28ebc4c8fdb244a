"""Runs plans on the model: numbers in, logits and drafts out. Every rank has one.

Owns the caches, the saved states and the hand-over between host and device; decides nothing.
Read next: `plan.py`, `rounds.py`, `model/transformer.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import local
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.rows import Store
from twinspark.cache.upload import download
from twinspark.engine.partial_pieces import Ended, LayeredModel, PartialPieces, step_input
from twinspark.engine.plan import (
    BindPages,
    CacheOp,
    CopyPage,
    DropRows,
    DropState,
    LoadState,
    PlannedRows,
    SaveState,
    StepPlan,
)
from twinspark.engine.rounds import Rounds
from twinspark.engine.sampler import ChoiceRule
from twinspark.kernels.cuda.launch import on_device
from twinspark.model.step import DraftRequest, DraftResult, StepInput, StepOutput

Logits = npt.NDArray[np.float32]
NO_RULES: Mapping[int, ChoiceRule] = MappingProxyType({})


def nothing() -> None:
    """Nothing to do."""


class PagedCaches(Protocol):
    """What the engine does with a model's state; `cache.view.Caches` is the one that counts."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one saved state."""

    @property
    def encoder_state_bytes(self) -> int:
        """Bytes of one that leaves decoder windows and draft context out."""

    def bind(self, slot: int, pages: Sequence[int]) -> None:
        """A slot starts over on these pages, in logical order."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's bytes."""

    def save_state(self, slot: int, position: int, *, encoder_only: bool = False) -> Any:
        """The fixed-size state of a slot whose positions below `position` are right."""

    def load_state(self, slot: int, position: int, state: Any) -> None:
        """Put a saved state into a slot; its pages are bound already."""


class Model(LayeredModel, Protocol):
    """What the engine needs of a model; `model.transformer.Transformer` is the one that counts."""

    def new_caches(
        self, num_slots: int, max_tokens: int, *, store: Store, page_tokens: int,
        num_pages: int | None, index_scratch_bytes: int, split_pool: bool,
    ) -> Any:  # fmt: skip
        """State for `num_slots` requests of up to `max_tokens` positions each."""

    def forward(self, step: StepInput, caches: Any) -> StepOutput:
        """Run rows; their state is in `caches` afterwards."""

    def draft(
        self,
        requests: Sequence[DraftRequest],
        caches: Any,
        pick: Callable[[int, int, Tensor], int] | None,
    ) -> list[DraftResult]:
        """Propose tokens; `pick(request_idx, j, logits_V)` chooses draft j of a request.

        With pick None only what the ranks compute together is run, and nothing is returned.
        """


class Followers(Protocol):
    """The other ranks, which are sent every plan before this rank runs it."""

    @property
    def compares(self) -> bool:
        """Whether `check` wants something of every plan's logits."""

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses tokens; else logits stay on its device."""

    def step(self, plan: StepPlan) -> None:
        """Have them run a plan."""

    def draft(self, requests: Sequence[DraftRequest]) -> None:
        """Have them run a draft pass."""

    def check(self, found: npt.NDArray[Any]) -> None:
        """Take what this rank computed for the plan that was sent last into the running digest.

        Args:
            found: its logits [R, V] fp32, or of a recorded round a number a row, int64 [T].
        """


class NoFollowers:
    """One rank: nobody to tell."""

    compares = False
    chooses = True

    def step(self, plan: StepPlan) -> None:
        """Nothing to do."""

    def draft(self, requests: Sequence[DraftRequest]) -> None:
        """Nothing to do."""

    def check(self, found: npt.NDArray[Any]) -> None:
        """Nothing to do."""


@dataclass(frozen=True, kw_only=True)
class StepLogits:
    """Logits of one plan.

    Attributes:
        windows: slot -> [rows of its window, V] fp32; slots that are in `chosen` may be left out.
        pieces: slot -> [rows of its piece, V] fp32, for pieces that want them.
        chosen: slot -> what follows each row of its window, for rules that a device has followed;
            -1 where there is nothing to choose.
    """

    windows: dict[int, Logits]
    pieces: dict[int, Logits]
    chosen: dict[int, tuple[int, ...]]


class Runner:
    """The model with the caches of all slots.

    Attributes:
        caches: of all slots.
    """

    def __init__(
        self,
        model: Model,
        caches: PagedCaches,
        *,
        followers: Followers | None = None,
        banned_V: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """`banned_V` is what no request may choose, for choices that are made on the device."""
        self._model = model
        self._followers = followers or NoFollowers()
        self._is_alone = followers is None
        self.caches = caches
        self._partial = PartialPieces(model, caches)
        self._states: dict[int, Any] = {}
        self._rounds = Rounds.of(model, caches, banned_V)
        device = getattr(model, "device", None)
        self._cuda: torch.device | None = None
        if isinstance(device, torch.device) and device.type == "cuda":
            self._cuda = device
        self._thread = local()

    @property
    def runs_in_its_thread(self) -> bool:
        """Whether the calling thread takes part in all of its work: one rank on a CPU."""
        return self._cuda is None and self._is_alone

    @property
    def loads_kernels(self) -> bool:
        """Whether numbers of rows that never came before may wait for a compiler: on a device."""
        return self._cuda is not None

    @property
    def follows_rules(self) -> bool:
        """Whether tokens are chosen by rules on a device; else rules given to it are not read."""
        return self._rounds is not None

    def replays(self, plan: StepPlan) -> bool:
        """Whether a plan is a round that is recorded, which the host has little to do for."""
        is_alone = plan.layers is None  # else there are layers to launch
        return is_alone and self._rounds is not None and self._rounds.replays(plan)

    def expect(self, windows: Sequence[PlannedRows]) -> None:
        """Prepare for windows of the next round, which are likely to come; changes no result."""
        if self._rounds is not None:
            self._rounds.expect(windows)

    def prepare(self, *, rows: int, requests: int) -> bool:
        """Record one of the rounds that are likely to come, while there is nothing else to do.

        Args:
            rows: most rows of a round that is worth it.
            requests: most requests of a draft pass.

        Returns:
            False where nothing is left to record. Several ranks record a round when it comes.
        """
        if self._rounds is None or not self._is_alone:
            return False
        with self._on_device():
            return self._rounds.prepare(rows=rows, requests=requests)

    def close(self) -> None:
        """Give up what is recorded; NCCL's end waits for recordings that hold its kernels."""
        self._partial.clear()
        if self._rounds is not None:
            self._rounds.close()

    def run(
        self,
        plan: StepPlan,
        rules: Mapping[int, ChoiceRule] = NO_RULES,
        ahead: Iterable[int] = (),
        meanwhile: Callable[[], None] = nothing,
    ) -> StepLogits:
        """Run a plan, on the followers too.

        Args:
            plan: what to run.
            rules: by slot, where nothing but a rule decides what follows the window's rows; a
                device may then choose, which spares the way of the logits.
            ahead: slots of `rules` that will most likely ask `draft` for what follows; a device
                may then draft at once. Looked at while the plan runs, if at all.
            meanwhile: work of the host, done while a device runs the plan.
        """
        self._followers.step(plan)
        for op in plan.ops:
            self._apply(op)
        with self._on_device():
            if self._rounds is not None:
                if self._rounds.fits(plan):
                    return self._round(self._rounds, plan, rules, ahead, meanwhile)
                self._rounds.drop_ahead()
            return self._step(plan, rules, meanwhile)

    def _step(
        self, plan: StepPlan, rules: Mapping[int, ChoiceRule], meanwhile: Callable[[], None]
    ) -> StepLogits:
        """A plan whose work is launched as it comes."""
        planned = (*plan.windows, *plan.pieces) if plan.is_mixed else plan.windows
        step, found = step_input(planned), []
        if planned:
            found.append(self._model.forward(step, self.caches).logits_RV)
            assert found[0].shape[0] == len(step.logit_rows), "a wanted row has no logits"
        ended = self._go_on(plan)
        if ended.logits_RV is not None:
            found.append(ended.logits_RV)
        meanwhile()
        chosen = self._choose(found[0], step, plan, rules) if planned else {}
        logits_RV = _one_on_host(found) if found else self._no_logits()
        self._followers.check(logits_RV)
        return replace(_by_slot((*planned, *ended.pieces), logits_RV), chosen=chosen)

    def _no_logits(self) -> Logits:
        """Of a plan that has run some layers of pieces and nothing else, once they are run."""
        self._settle_layers()
        return np.zeros((0, self._model.config.vocab_size), np.float32)

    def _go_on(self, plan: StepPlan) -> Ended:
        """The plan's layers of pieces, launched behind its windows."""
        return Ended() if plan.layers is None else self._partial.run(plan.pieces, plan.layers)

    def _settle_layers(self) -> None:
        """Until a device has run what it was given: what that took is this round's, not the next's.

        Nothing is lost: the host was launching those layers while the device ran the windows.
        """
        if self._cuda is not None:
            torch.cuda.current_stream(self._cuda).synchronize()

    def _choose(
        self, logits_RV: Tensor, step: StepInput, plan: StepPlan, rules: Mapping[int, ChoiceRule]
    ) -> dict[int, tuple[int, ...]]:
        """By slot what follows the windows' rows, where rounds of this model choose it, too."""
        if self._rounds is None or not rules:
            return {}
        spans = step.spans[: len(plan.windows)]  # windows come first
        windows_TV = logits_RV[: sum(span.count for span in spans)]
        each = [rules.get(window.slot) for window in plan.windows]
        tokens = download(self._rounds.choose(windows_TV, spans, each)).tolist()
        return _tokens_by_slot(plan, tokens, rules)

    def _round(
        self,
        rounds: Rounds,
        plan: StepPlan,
        rules: Mapping[int, ChoiceRule],
        ahead: Iterable[int],
        meanwhile: Callable[[], None],
    ) -> StepLogits:
        """A recorded round; logits are brought over for slots without a rule, or to compare."""
        each = [rules.get(window.slot) for window in plan.windows]
        # other ranks are told of a draft pass before it runs, so nothing runs ahead of that
        logits_TV = rounds.run(plan.windows, each, ahead if self._is_alone else ())
        host_chooses = any(rule is None for rule in each)
        windows: dict[int, Logits] = {}
        digests: list[Tensor] = []
        if host_chooses or self._followers.compares:
            meanwhile()
            if self._followers.compares:
                digests.append(download(rounds.digests(logits_TV)))
            windows = self._logits_for_host(plan, rules, logits_TV)
            rounds.draft_ahead()  # it may overwrite the logits
            ended = self._go_on(plan)
        else:
            rounds.draft_ahead()
            ended = self._go_on(plan)
            meanwhile()
        num_rows = sum(len(window.ids) for window in plan.windows)
        tokens = rounds.tokens(num_rows) if rules else []
        if plan.layers is not None:
            self._settle_layers()
        pieces: dict[int, Logits] = {}
        if ended.logits_RV is not None:
            pieces = _by_slot(ended.pieces, to_host(ended.logits_RV)).pieces
            if self._followers.compares:
                digests.append(download(rounds.digests(ended.logits_RV)))
        if digests:
            self._followers.check(torch.cat(digests).numpy())
        chosen = _tokens_by_slot(plan, tokens, rules)
        return StepLogits(windows=windows, pieces=pieces, chosen=chosen)

    def _logits_for_host(
        self, plan: StepPlan, rules: Mapping[int, ChoiceRule], logits_TV: Tensor
    ) -> dict[int, Logits]:
        """By slot, the rows of windows without a rule, if this rank chooses."""
        windows: dict[int, Logits] = {}
        if not self._followers.chooses:
            return windows
        start = 0
        for window in plan.windows:
            end = start + len(window.ids)
            if window.slot not in rules:
                windows[window.slot] = to_host(logits_TV[start:end])
            start = end
        return windows

    def draft(
        self,
        requests: Sequence[DraftRequest],
        pick: Callable[[int, int, Logits], int] | None,
        rules: Sequence[ChoiceRule | None] | None = None,
    ) -> list[DraftResult]:
        """Let the draft blocks propose.

        Args:
            requests: what to draft for.
            pick: sees host logits [V] fp32; None on followers.
            rules: of the requests, None where more decides; a device may choose by them instead
                of asking `pick`.
        """
        self._followers.draft(requests)
        if pick is None:
            with self._on_device():
                if self._rounds is None:
                    return self._model.draft(requests, self.caches, None)
                self._rounds.follow(requests)
                return []

        def pick_row(number: int, j: int, logits_V: Tensor) -> int:
            return pick(number, j, to_host(logits_V))

        with self._on_device():
            if self._rounds is None:
                return self._model.draft(requests, self.caches, pick_row)
            return self._rounds.draft(requests, rules or [None] * len(requests), pick_row)

    def _on_device(self) -> AbstractContextManager[object]:
        """Every thread that runs a plan has a current CUDA device of its own."""
        if self._cuda is None:
            return nullcontext()
        if not hasattr(self._thread, "is_ready"):
            # torch gives a thread its context when it waits, the driver launches only with one
            torch.cuda.current_stream(self._cuda).synchronize()
            self._thread.is_ready = True
        return on_device(self._cuda)

    def _apply(self, op: CacheOp) -> None:
        match op:
            case BindPages():
                self.caches.bind(op.slot, op.pages)
            case CopyPage():
                self.caches.copy_page(op.source, op.target)
            case SaveState():
                assert op.state_id not in self._states
                self._states[op.state_id] = self.caches.save_state(
                    op.slot, op.position, encoder_only=op.encoder_only
                )
            case LoadState():
                self.caches.load_state(op.slot, op.position, self._states[op.state_id])
            case DropState():
                del self._states[op.state_id]
            case DropRows():
                self._partial.drop(op.slot)


def _one_on_host(parts: Sequence[Tensor]) -> Logits:
    """Logits behind each other on the host; of one part nothing is copied there."""
    return to_host(parts[0] if len(parts) == 1 else torch.cat(list(parts)))


def _tokens_by_slot(
    plan: StepPlan, tokens: Sequence[int], rules: Mapping[int, ChoiceRule]
) -> dict[int, tuple[int, ...]]:
    """What follows the rows of each window that has a rule; `tokens` are of all windows' rows."""
    chosen: dict[int, tuple[int, ...]] = {}
    start = 0
    for window in plan.windows:
        if window.slot in rules:
            chosen[window.slot] = tuple(tokens[start : start + len(window.ids)])
        start += len(window.ids)
    return chosen


def _by_slot(planned: Sequence[PlannedRows], logits_RV: Logits) -> StepLogits:
    windows: dict[int, Logits] = {}
    pieces: dict[int, Logits] = {}
    start = 0
    for part in planned:
        if part.prompt_end is None or part.wants_logits:
            into = windows if part.prompt_end is None else pieces
            into[part.slot] = logits_RV[start : start + len(part.ids)]
            start += len(part.ids)
    return StepLogits(windows=windows, pieces=pieces, chosen={})


def to_host(logits: Tensor) -> Logits:
    """Logits as fp32 in host memory; shares memory where it can."""
    array: Logits = download(logits.detach().float()).numpy()
    return array
