"""Decode rounds and draft blocks on a CUDA device, captured once and replayed.

Launching a round's kernels one by one takes the host longer than the device runs them, so a round
is padded to a bucket of rows and of context, its work recorded the first time the bucket comes, and
replayed from then on. Steps that do not fit are the eager forward's. Read next: `runner.py`,
`model/decode.py`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.layout import RING_ROWS
from twinspark.cache.upload import download, pack_bytes, unpack_bytes
from twinspark.cache.view import Caches
from twinspark.engine.sampler import ChoiceRule
from twinspark.kernels.head import RowRules, choose_rows
from twinspark.model.decode import DecodeRound, DraftRound, bucket_of, host_round
from twinspark.model.dspark import Pick
from twinspark.model.step import DraftRequest, DraftResult, Span, StepInput
from twinspark.model.transformer import Transformer

FIRST_CONTEXT = 2048
"""Positions of the smallest bucket of contexts; the others are twice as large each."""

REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64)

MOST_RECORDED = 48
"""Recordings that are kept; the one that was not used for longest goes first."""

_GREEDY = ChoiceRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_NUM_RULES = 7  # tensors of RowRules
_SPREAD = -0x61C8864680B583EB  # 2^64 over the golden ratio, as int64

logger = logging.getLogger(__name__)

Work = Callable[..., tuple[Tensor, ...]]


class Recorded(Protocol):
    """Work on tensors that stay where they are."""

    def replay(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Do it on these inputs, given on the host.

        The result is to be read before anything else is replayed.
        """


class Recorder(Protocol):
    """Makes recorded work of work."""

    def record(self, work: Work, tensors: Sequence[Tensor]) -> Recorded:
        """Do it once on these inputs, given on the host, and record it; it must bear repeating.

        What is done before the first replay must ask no other rank (`Transformer.rehearsal`).
        """


class Graphs:
    """Records CUDA graphs that share their memory, as only one of them runs at a time."""

    def __init__(
        self, device: torch.device, rehearsal: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """On this device; `rehearsal` is the model's."""
        self._device, self._rehearsal = device, rehearsal
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work, tensors: Sequence[Tensor]) -> "Graph":
        """See `Recorder`."""
        inputs = pack_bytes(tensors).to(self._device)
        held = unpack_bytes(inputs, tensors)
        with torch.cuda.device(self._device):
            # Loads kernels, which a recording cannot. Its results mean nothing on one rank of
            # several, which does no harm: the replay writes all that it has written.
            with self._rehearsal():
                work(*held)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may call CUDA meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = work(*held)
        return Graph(graph, inputs, found)


class Graph:
    """Work in a CUDA graph."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Tensor, found: tuple[Tensor, ...]
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._found = found

    def replay(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Do the work again."""
        self._inputs.copy_(pack_bytes(tensors, pin=True), non_blocking=True)
        self._graph.replay()
        return self._found


class Rounds:
    """Recorded rounds of one model with one set of caches.

    A round's tokens are chosen on the device too, for rows that a rule alone decides.
    """

    def __init__(
        self,
        model: Transformer,
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
        self._recorder = recorder or Graphs(model.device, model.rehearsal)
        self._image_id = model.config.image_token_id
        self._recorded: OrderedDict[tuple[str, int, int], Recorded] = OrderedDict()
        mask = np.zeros(model.config.vocab_size, np.bool_) if banned_V is None else banned_V
        self._banned_V = torch.from_numpy(mask).to(model.device)
        self._odd_V = odd_numbers(model.config.vocab_size, model.device)

    @staticmethod
    def of(
        model: object, caches: object, banned_V: npt.NDArray[np.bool_] | None = None
    ) -> "Rounds | None":
        """Rounds where the model's rows are worked out on a CUDA device, else None."""
        if isinstance(model, Transformer) and isinstance(caches, Caches):
            if model.device.type == "cuda" and model.is_placed(caches):
                return Rounds(model, caches, banned_V=banned_V)
        return None

    def fits(self, step: StepInput) -> bool:
        """Whether a step is a round: decode rows that nothing sets apart, all with logits."""
        return (
            bucket_of(len(step.ids_T)) is not None
            and len(step.logit_rows) == len(step.ids_T)
            and self._image_id not in step.ids_T
            and all(
                span.prompt_end is None
                and span.count <= RING_ROWS
                and not span.is_pruned
                and not span.has_bf16_mixing
                for span in step.spans
            )
        )

    def run(
        self, step: StepInput, rules: Sequence[ChoiceRule | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run a round; what it gives is to be read before anything else is run.

        Args:
            step: one that fits.
            rules: one a span; None where more than the rows decides.

        Returns:
            logits [T, V] of its rows, and int32 [T] what follows each by its span's rule; -1 where
            there is nothing to choose, anything where there is no rule.
        """
        model, caches = self._model, self._caches
        size = bucket_of(len(step.ids_T))
        assert size is not None, "more rows than a round has"
        model.begin(step, caches)
        context = self._context(max(span.first + span.count for span in step.spans))
        inputs = host_round(step, model.engram_rows(step), size)

        def decode(*held: Tensor) -> tuple[Tensor, ...]:
            (ids_T, positions_T, slots_T, *engram), rules_T = held[:-_NUM_RULES], _rules_in(held)
            round_ = DecodeRound(ids_T, positions_T, slots_T, tuple(engram), context)
            logits_TV = model.decode(round_, caches)
            return logits_TV, choose_rows(logits_TV.float(), rules_T, banned_V=self._banned_V)

        rows = _rows_of(step.spans, rules or [None] * len(step.spans))
        tensors = [*inputs, *_rule_tensors(rows, size)]
        logits_TV, tokens_T = self._of(("decode", size, context), tensors, decode).replay(tensors)
        return logits_TV[: len(rows)], tokens_T[: len(rows)]

    def choose(
        self, logits_TV: Tensor, spans: Sequence[Span], rules: Sequence[ChoiceRule | None]
    ) -> Tensor:
        """What follows the rows of an eager step, as `run` would choose it: int32 [T].

        The device's exp and log may part from the host's in the last bit, so a request's tokens
        must be chosen in one place, whatever else is in its steps.
        """
        rows = _rows_of(spans, rules)
        tensors = [t.to(logits_TV.device) for t in _rule_tensors(rows, len(rows))]
        return choose_rows(logits_TV.float(), _rules_in(tensors), banned_V=self._banned_V)

    def digests(self, logits_TV: Tensor) -> Tensor:
        """What ranks compare of a round's logits in place of them: int64 [T], see `row_digests`."""
        return row_digests(logits_TV, self._odd_V)

    def draft(self, requests: Sequence[DraftRequest], pick: Pick | None) -> list[DraftResult]:
        """Draft for requests, as `Transformer.draft`; the host picks every token.

        Every rank pads to the same bucket and meets the others in the blocks only, so one may
        choose by rules while another follows without `pick`.
        """
        tensors = self._request_tensors(requests)
        if tensors is None:
            return self._model.draft(requests, self._caches, pick)
        model, caches = self._model, self._caches
        recorded = self._of(
            ("draft", len(tensors[0]), 0),
            tensors,
            lambda *held: model.draft_block(DraftRound(*held), caches),
        )
        hidden_TD, base_TV = recorded.replay(tensors)
        if pick is None:
            return []
        rows = len(requests) * model.config.dspark_block_size
        return model.walk(requests, hidden_TD[:rows], base_TV[:rows], pick)

    def draft_by_rules(
        self, requests: Sequence[DraftRequest], rules: Sequence[ChoiceRule]
    ) -> list[DraftResult] | None:
        """The same with all tokens chosen on the device by rules; None where that cannot be."""
        inputs = self._request_tensors(requests)
        if inputs is None or not self._model.walks_on_device:
            return None
        model, caches, size = self._model, self._caches, len(inputs[0])
        num_block = model.config.dspark_block_size

        def block(*held: Tensor) -> tuple[Tensor, ...]:
            round_, rules_n = DraftRound(*held[:-_NUM_RULES]), _rules_in(held)

            def choose(j: int, logits_nV: Tensor) -> Tensor:
                return choose_rows(logits_nV.float(), rules_n.moved(j), banned_V=self._banned_V)

            hidden_TD, base_TV = model.draft_block(round_, caches)
            return model.walk_by(round_.tokens_n, hidden_TD, base_TV, choose)

        rows = [(rule, r.position + 1) for r, rule in zip(requests, rules, strict=True)]
        tensors = [*inputs, *_rule_tensors(rows, size)]
        found = self._of(("draft by rules", size, num_block), tensors, block).replay(tensors)
        tokens_nB, confidence_nB = (download(tensor) for tensor in found)
        return [
            DraftResult(tokens=[max(t, 0) for t in tokens], confidence=confidence)
            for tokens, confidence, _ in zip(
                tokens_nB.tolist(), confidence_nB.tolist(), requests, strict=False
            )
        ]

    def _request_tensors(self, requests: Sequence[DraftRequest]) -> list[Tensor] | None:
        """Tokens, positions and slots in a bucket's size; None where there is none."""
        size = bucket_of(len(requests), REQUEST_BUCKETS) if requests else None
        if size is None or not self._model.has_draft:
            return None
        missing = size - len(requests)
        columns = zip(*((r.token, r.position, r.slot) for r in requests), strict=True)
        return [
            torch.tensor([*column, *[padding] * missing], dtype=torch.int32)
            for column, padding in zip(columns, (0, 0, -1), strict=True)
        ]

    def _context(self, tokens: int) -> int:
        context = FIRST_CONTEXT
        while context < tokens:
            context *= 2
        return min(context, self._caches.layout.max_tokens)

    def _of(self, key: tuple[str, int, int], tensors: Sequence[Tensor], work: Work) -> Recorded:
        _ = self._caches.starts_S  # brought to the device before the round that reads it
        if key not in self._recorded:
            started_s = perf_counter()
            if len(self._recorded) == MOST_RECORDED:
                self._recorded.popitem(last=False)
            self._recorded[key] = self._recorder.record(work, tensors)
            logger.debug("recorded %s in %.2f s", key, perf_counter() - started_s)
        self._recorded.move_to_end(key)
        return self._recorded[key]


def odd_numbers(count: int, device: torch.device) -> Tensor:
    """Odd int64 numbers [count], as if drawn at random."""
    spread = torch.arange(count, dtype=torch.int64, device=device) * _SPREAD
    return spread ^ (spread >> 29) | 1


def row_digests(logits_TV: Tensor, odd_V: Tensor) -> Tensor:
    """A number for the bits of each row, int64 [T]: worked out where the logits are.

    The sum of the values' bits, each times an odd number of its own, modulo 2^64: one value with
    other bits always shows, as an odd number times less than 2^32 is never 0, and no order of
    adding can change it.
    """
    bits = torch.int64 if logits_TV.dtype == torch.float64 else torch.int32
    return (logits_TV.view(bits).long() * odd_V).sum(dim=1)


def _rows_of(
    spans: Sequence[Span], rules: Sequence[ChoiceRule | None]
) -> list[tuple[ChoiceRule | None, int]]:
    """The rule of every row, and the position of the token that follows it."""
    pairs = zip(spans, rules, strict=True)
    return [(rule, span.first + i + 1) for span, rule in pairs for i in range(span.count)]


def _rule_tensors(rows: Sequence[tuple[ChoiceRule | None, int]], size: int) -> tuple[Tensor, ...]:
    """Rules and the positions of the chosen tokens, on the host, padded to `size` rows."""
    padded = [*rows, *[(None, 0)] * (size - len(rows))]
    rules = [rule or _GREEDY for rule, _ in padded]
    return RowRules.of(
        temperature=[rule.temperature for rule in rules],
        top_k=[rule.top_k for rule in rules],
        top_p=[rule.top_p for rule in rules],
        min_p=[rule.min_p for rule in rules],
        seed=[rule.seed for rule in rules],
        position=[position for _, position in padded],
        choice=[rule.choice_index for rule in rules],
    ).tensors()


def _rules_in(held: Sequence[Tensor]) -> RowRules:
    return RowRules(*held[-_NUM_RULES:])
