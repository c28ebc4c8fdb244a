"""Decode rounds and draft blocks on a CUDA device, captured once and replayed.

Launching a round's kernels one by one takes the host longer than the device runs them, so a round
is padded to a bucket of rows and of context, its work recorded the first time the bucket comes, and
replayed from then on. Where the next draft pass is foreseen it follows its round on the device at
once: how far drafts hold is found there, too, and the host reads tokens while blocks are drafted.
Steps that do not fit are the eager forward's. Read next: `recording.py`, `round_inputs.py`,
`runner.py`, `model/decode.py`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.layout import RING_ROWS
from twinspark.cache.staging import Landing
from twinspark.cache.view import Caches
from twinspark.config.model import ModelConfig
from twinspark.engine.engram_ahead import EngramAhead
from twinspark.engine.plan import PlannedRows, StepPlan
from twinspark.engine.recording import (
    MOST_RECORDED,
    Graphs,
    Key,
    Recorded,
    Recorder,
    Recordings,
)
from twinspark.engine.round_inputs import MOST_REQUESTS, MOST_ROWS, REQUEST_BUCKETS, RoundInputs
from twinspark.engine.row_digests import odd_numbers, row_digests
from twinspark.engine.sampler import ChoiceRule
from twinspark.kernels.head import RowRules, accept_rows, choose_rows
from twinspark.model.decode import ROW_BUCKETS, DecodeRound, DraftRound, bucket_of
from twinspark.model.dspark import Pick
from twinspark.model.step import DraftRequest, DraftResult, Span
from twinspark.model.transformer import Transformer

FIRST_CONTEXT = 2048
"""Positions of the smallest bucket of contexts; the others are twice as large each."""

_GREEDY = ChoiceRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_HEAD = 2  # position and token before the drafts of a request


class PlacedModel(Protocol):
    """What rounds need of a model; `Transformer`, where its rows are placed."""

    config: ModelConfig
    device: torch.device

    @property
    def has_draft(self) -> bool:
        """Whether there are draft blocks."""

    @property
    def walks_on_device(self) -> bool:
        """Whether there is `walk_by`."""

    @property
    def engram_fields(self) -> list[tuple[torch.dtype, tuple[int, int]]]:
        """See `Transformer`; so are the others."""

    def put_engram(self, rows: Sequence[PlannedRows], into: Sequence[npt.NDArray[Any]]) -> None:
        """Write Engram rows."""

    def engram_tables(self, sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Engram rows as `decode` reads them."""

    def decode(self, round_: DecodeRound, caches: Caches) -> Tensor:
        """Logits of decode rows."""

    def draft_block(self, round_: DraftRound, caches: Caches) -> tuple[Tensor, Tensor]:
        """Hidden rows and base logits of blocks."""

    def draft(
        self, requests: Sequence[DraftRequest], caches: Caches, pick: Pick | None
    ) -> list[DraftResult]:
        """A draft pass, launched by the host."""

    def walk(
        self, requests: Sequence[DraftRequest], hidden_TD: Tensor, base_TV: Tensor, pick: Pick
    ) -> list[DraftResult]:
        """Choose the tokens of blocks on the host."""

    def walk_by(
        self, tokens_n: Tensor, hidden_TD: Tensor, base_TV: Tensor,
        choose: Callable[[int, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Choose them on the device."""

    def rehearsal(self) -> AbstractContextManager[object]:
        """While open other ranks are not asked."""


class Rounds:
    """Recorded rounds of one model with one set of caches.

    A round's tokens are chosen on the device too, for rows that a rule alone decides.
    """

    def __init__(
        self,
        model: PlacedModel,
        caches: Caches,
        *,
        banned_V: npt.NDArray[np.bool_] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Nothing is recorded before it is needed.

        Args:
            model: whose rows are placed.
            caches: of all slots.
            banned_V: what no request may choose.
            recorder: None records CUDA graphs.
        """
        self._model = model
        self._caches = caches
        self._recordings = Recordings(recorder or Graphs(model.device, model.rehearsal))
        self._image_id = model.config.image_token_id
        mask = np.zeros(model.config.vocab_size, np.bool_) if banned_V is None else banned_V
        self._banned_V = torch.from_numpy(mask).to(model.device)
        self._inputs = RoundInputs(model.engram_fields, model.device)
        like = self._inputs.sized(MOST_ROWS).arrays
        self._engram = EngramAhead(model.put_engram, like, MOST_ROWS)
        self._chosen = Landing(MOST_ROWS, 1, model.device)
        width = _HEAD + 2 * model.config.dspark_block_size
        self._drafted = Landing(MOST_REQUESTS, width, model.device)
        self._context_before = self._context(1)  # of the round that ran last
        self._foreseen = 0  # requests whose draft pass may follow the round that ran last
        self._ahead: list[int] = []  # slots that it was run for
        self._odd_V = odd_numbers(model.config.vocab_size, model.device)
        self._works: dict[str, Callable[[int, int], tuple[Tensor, ...]]] = {
            "decode": self._decode,
            "draft": self._draft_blocks,
            "draft by rules": self._draft_given,
            "draft ahead": self._draft_followers,
        }

    @staticmethod
    def of(
        model: object, caches: object, banned_V: npt.NDArray[np.bool_] | None = None
    ) -> "Rounds | None":
        """Rounds where the model's rows are worked out on a CUDA device, else None."""
        if isinstance(model, Transformer) and isinstance(caches, Caches):
            if model.device.type == "cuda" and model.is_placed(caches):
                return Rounds(model, caches, banned_V=banned_V)
        return None

    @property
    def recorded(self) -> list[Key]:
        """What is recorded."""
        return self._recordings.keys

    def prepare(self, *, rows: int, requests: int) -> bool:
        """Record one of the rounds and draft passes that are likely to come, of padding alone.

        Padding writes nothing, so this may be done whenever no round is under way. The smallest
        context is prepared for, that of the latest round, and the one that it grows into.

        Args:
            rows: most rows of a round that is worth it.
            requests: most requests of a draft pass; 0 is no pass.

        Returns:
            False where all are recorded, or as many as are kept.
        """
        self._ahead = []
        self._settle()
        key = next((key for key in self._likely(rows, requests) if key not in self.recorded), None)
        if key is None or len(self.recorded) >= MOST_RECORDED:
            return False
        kind, size, context = key
        if kind == "decode":
            self._inputs.put_rows((), (), size)
        else:
            self._inputs.put_requests((), (), size)
        self._of(kind, size, context)
        return True

    def _likely(self, rows: int, requests: int) -> Iterator[Key]:
        """Keys of rounds and passes that are likely to come, the likeliest first."""
        for kind in ("draft by rules", "draft ahead") if self._model.walks_on_device else ():
            for size in REQUEST_BUCKETS[: bisect_left(REQUEST_BUCKETS, requests) + bool(requests)]:
                yield kind, size, 0
        next_context = self._context(self._context_before + 1)
        for context in dict.fromkeys((self._context(1), self._context_before, next_context)):
            for size in ROW_BUCKETS[: bisect_left(ROW_BUCKETS, rows) + 1]:
                yield "decode", size, context

    def close(self) -> None:
        """Forget what is recorded, with the memory that it holds."""
        self._recordings.clear()

    def fits(self, plan: StepPlan) -> bool:
        """Whether a plan's windows are a round: a pass of their own, and no row is set apart."""
        if plan.is_mixed or not plan.windows:
            return False
        for window in plan.windows:
            if len(window.ids) > RING_ROWS or window.is_pruned or window.has_bf16_mixing:
                return False
            if self._image_id in window.ids:
                return False
        return sum(len(window.ids) for window in plan.windows) <= MOST_ROWS

    def replays(self, plan: StepPlan) -> bool:
        """Whether a plan is a round that is recorded already."""
        if not self.fits(plan):
            return False
        size = bucket_of(sum(len(window.ids) for window in plan.windows))
        assert size is not None
        return self._recordings.replays(("decode", size, self._context(_end(plan.windows))))

    def expect(self, windows: Sequence[PlannedRows]) -> None:
        """Prepare for windows that are likely to come, while a round runs; a guess changes nothing.

        Args:
            windows: of the next round.
        """
        self._engram.expect(windows)

    def run(
        self,
        windows: Sequence[PlannedRows],
        rules: Sequence[ChoiceRule | None],
        ahead: Iterable[int] = (),
    ) -> Tensor:
        """Run a round; what it gives is to be read before anything else is run.

        Args:
            windows: of a plan that fits.
            rules: one a window; None where more than the rows decides.
            ahead: slots with a rule for which `draft_ahead` shall draft.

        Returns:
            logits [T, V] of its rows.
        """
        inputs, caches = self._inputs, self._caches
        end = _end(windows)
        assert end <= caches.layout.max_tokens, "past the cache's end"
        size = bucket_of(sum(len(window.ids) for window in windows))
        assert size is not None, "more rows than a round has"
        for window in windows:
            if window.first == 0:
                caches.reset(window.slot)
        self._chosen.settle()
        num = inputs.put_rows(windows, rules, size)
        self._engram.put(windows, inputs.sized(size).arrays)
        _ = caches.starts_S  # brought to the device before the round that reads it
        context = self._context_before = self._context(end)
        (logits_TV,) = self._of("decode", size, context).replay()
        self._chosen.mark()
        self._foresee(windows, rules, ahead)  # the round does not read that
        return logits_TV[:num]

    def tokens(self, num: int) -> list[int]:
        """What follows the rows of the round that ran last, by their rules.

        -1 where there is nothing to choose, anything where there is no rule.
        """
        self._chosen.wait()
        tokens: list[int] = self._chosen.array[:num, 0].tolist()
        return tokens

    def choose(
        self, logits_TV: Tensor, spans: Sequence[Span], rules: Sequence[ChoiceRule | None]
    ) -> Tensor:
        """What follows the rows of an eager step, as `run` would choose it: int32 [T].

        The device's exp and log may part from the host's in the last bit, so a request's tokens
        must be chosen in one place, whatever else is in its steps.
        """
        rows = [
            (rule or _GREEDY, span.first + i + 1)
            for span, rule in zip(spans, rules, strict=True)
            for i in range(span.count)
        ]
        on_rows = RowRules.of(
            temperature=[rule.temperature for rule, _ in rows],
            top_k=[rule.top_k for rule, _ in rows],
            top_p=[rule.top_p for rule, _ in rows],
            min_p=[rule.min_p for rule, _ in rows],
            seed=[rule.seed for rule, _ in rows],
            position=[position for _, position in rows],
            choice=[rule.choice_index for rule, _ in rows],
            device=logits_TV.device,
        )
        return choose_rows(logits_TV.float(), on_rows, banned_V=self._banned_V)

    def digests(self, logits_TV: Tensor) -> Tensor:
        """What ranks compare of a round's logits in place of them: int64 [T], see `row_digests`."""
        return row_digests(logits_TV, self._odd_V)

    def draft(
        self,
        requests: Sequence[DraftRequest],
        rules: Sequence[ChoiceRule | None],
        pick: Pick,
    ) -> list[DraftResult]:
        """Draft for requests, as `Transformer.draft`.

        Those that `draft_ahead` was right about are answered from what it drafted: what a block
        gets does not depend on the others of its pass.

        Args:
            requests: what to draft for.
            rules: of the requests; None where more than the rows decides.
            pick: chooses on the host, for all of a pass of which one has no rule.
        """
        found, keys = self._take_ahead(), [*map(_key, requests)]
        missing = [n for n, key in enumerate(keys) if key not in found]
        if missing:
            asked = [requests[n] for n in missing]
            free = [rule for rule in (rules[n] for n in missing) if rule is not None]

            def pick_missing(number: int, j: int, logits_V: Tensor) -> int:
                return pick(missing[number], j, logits_V)

            results = self._draft_free(asked, free) if len(free) == len(asked) else None
            if results is None:
                results = self._draft_picked(asked, pick_missing)
            found |= zip(map(_key, asked), results, strict=True)
        return [found[key] for key in keys]

    def follow(self, requests: Sequence[DraftRequest]) -> None:
        """The blocks of a pass whose tokens another rank chooses, on the host or by rules.

        Every rank pads to the same bucket, and meets the others in the blocks only.
        """
        if requests:
            self._draft_picked(requests, None)

    def _draft_picked(
        self, requests: Sequence[DraftRequest], pick: Pick | None
    ) -> list[DraftResult]:
        """The host picks every token; without `pick` none is."""
        model = self._model
        size = bucket_of(len(requests), REQUEST_BUCKETS)
        if size is None or not model.has_draft:
            return model.draft(requests, self._caches, pick)
        self._drafted.settle()
        self._inputs.put_requests(requests, (), size)
        hidden_TD, base_TV = self._of("draft", size, 0).replay()
        self._drafted.mark()
        if pick is None:
            return []
        rows = len(requests) * model.config.dspark_block_size
        return model.walk(requests, hidden_TD[:rows], base_TV[:rows], pick)

    def _draft_free(
        self, requests: Sequence[DraftRequest], rules: Sequence[ChoiceRule]
    ) -> list[DraftResult] | None:
        """All tokens are chosen on the device by rules; None where that cannot be."""
        size = bucket_of(len(requests), REQUEST_BUCKETS)
        if size is None or not self._model.walks_on_device:
            return None
        self._drafted.settle()
        self._inputs.put_requests(requests, rules, size)
        self._of("draft by rules", size, 0).replay()
        self._drafted.mark()
        found = self._read([request.slot for request in requests])
        return [found[_key(request)] for request in requests]

    def draft_ahead(self) -> None:
        """Begin the draft pass that was foreseen for the round that ran last, if one was.

        The round's logits must have been read, or not be needed.
        """
        if self._ahead:
            size = self._foreseen
            self._of("draft ahead", size, 0).replay()
            self._drafted.mark()

    def drop_ahead(self) -> None:
        """Forget what was drafted ahead: the caches go on."""
        self._ahead = []

    def _foresee(
        self,
        windows: Sequence[PlannedRows],
        rules: Sequence[ChoiceRule | None],
        ahead: Iterable[int],
    ) -> None:
        self._ahead = []
        wanted = set(ahead)
        if not wanted or not self._model.walks_on_device:
            return
        row, asked, by = 0, [], []
        for window, rule in zip(windows, rules, strict=True):
            if rule is not None and window.slot in wanted:
                asked.append((window, row))
                by.append(rule)
            row += len(window.ids)
        size = bucket_of(len(asked), REQUEST_BUCKETS)
        if asked and size is not None:
            self._drafted.settle()  # a pass that nobody asked for in the end
            self._inputs.put_followers(asked, by, size)
            self._foreseen, self._ahead = size, [window.slot for window, _ in asked]

    def _settle(self) -> None:
        """Wait for what reads staged numbers, where nobody has."""
        self._chosen.settle()
        self._drafted.settle()

    def _take_ahead(self) -> dict[tuple[int, int, int], DraftResult]:
        slots, self._ahead = self._ahead, []
        return self._read(slots) if slots else {}

    def _read(self, slots: Sequence[int]) -> dict[tuple[int, int, int], DraftResult]:
        """What the pass that was launched last gave, by slot, position and token."""
        self._drafted.wait()
        end = _HEAD + self._model.config.dspark_block_size
        rows = self._drafted.array[: len(slots)]
        confidence = rows[:, end:].view(np.float32).tolist()
        found = {}
        for slot, row, chances in zip(slots, rows[:, :end].tolist(), confidence, strict=True):
            tokens = [max(token, 0) for token in row[_HEAD:]]
            found[slot, row[0], row[1]] = DraftResult(tokens=tokens, confidence=chances)
        return found

    def _decode(self, size: int, context: int) -> tuple[Tensor, ...]:
        inputs, sized = self._inputs, self._inputs.sized(size)
        sized.part.bring()
        tables = self._model.engram_tables(sized.engram)
        round_ = DecodeRound(
            inputs.ids_T[:size], inputs.positions_T[:size], inputs.slots_T[:size], tables, context
        )
        logits_TV = self._model.decode(round_, self._caches)
        rules = inputs.rules_T.rules(size, inputs.following_T[:size])
        chosen_T = choose_rows(logits_TV.float(), rules, banned_V=self._banned_V)
        self._chosen.put(chosen_T[:, None])
        return (logits_TV,)

    def _draft_blocks(self, size: int, _: int) -> tuple[Tensor, ...]:
        inputs = self._inputs
        inputs.requests_part.bring()
        round_ = DraftRound(
            inputs.tokens_n[:size], inputs.positions_n[:size], inputs.slots_n[:size]
        )
        return self._model.draft_block(round_, self._caches)

    def _draft_given(self, size: int, _: int) -> tuple[Tensor, ...]:
        inputs = self._inputs
        inputs.requests_part.bring()
        return self._draft_by_rules(inputs.tokens_n[:size], inputs.positions_n[:size])

    def _draft_followers(self, size: int, _: int) -> tuple[Tensor, ...]:
        inputs = self._inputs
        inputs.requests_part.bring()
        kept_n, following_n = accept_rows(
            self._chosen.tensor.view(-1), inputs.ids_T, inputs.firsts_n[:size],
            inputs.counts_n[:size],
        )  # fmt: skip
        positions_n = inputs.positions_n[:size] + kept_n + 1
        return self._draft_by_rules(following_n.clamp(min=0), positions_n)

    def _draft_by_rules(self, tokens_n: Tensor, positions_n: Tensor) -> tuple[Tensor, ...]:
        model, size = self._model, len(tokens_n)
        rules_n = self._inputs.rules_n.rules(size, positions_n + 1)

        def choose(j: int, logits_nV: Tensor) -> Tensor:
            return choose_rows(logits_nV.float(), rules_n.moved(j), banned_V=self._banned_V)

        round_ = DraftRound(tokens_n, positions_n, self._inputs.slots_n[:size])
        hidden_TD, base_TV = model.draft_block(round_, self._caches)
        tokens_nB, confidence_nB = model.walk_by(tokens_n, hidden_TD, base_TV, choose)
        head_n2 = torch.stack([positions_n, tokens_n], dim=1)
        bits_nB = confidence_nB.float().view(torch.int32)
        self._drafted.put(torch.cat([head_n2, tokens_nB, bits_nB], dim=1))
        return ()

    def _of(self, kind: str, size: int, context: int) -> Recorded:
        return self._recordings.of((kind, size, context), partial(self._works[kind], size, context))

    def _context(self, tokens: int) -> int:
        context = FIRST_CONTEXT
        while context < tokens:
            context *= 2
        return min(context, self._caches.layout.max_tokens)


def _end(windows: Sequence[PlannedRows]) -> int:
    return max(window.first + len(window.ids) for window in windows)


def _key(request: DraftRequest) -> tuple[int, int, int]:
    return request.slot, request.position, request.token
