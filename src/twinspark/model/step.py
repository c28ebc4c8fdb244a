"""What crosses the line between the engine and the model: steps in, logits and drafts out.

A row is (slot, position, token). The model keeps nothing between steps but what is in the caches.
Read next: `transformer.py`.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

PrefillMode = Literal["full", "cone", "replay"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive positions of one slot.

    Attributes:
        slot: whose state.
        first: position of the first row.
        count: rows, at least 1.
        prompt_end: for prompt rows the apex, else None: the position up to which prompt rows run
            before others are read. The modes "cone" and "replay" need it. Of a prompt in several
            cones each piece names the next apex; "replay" has one, the end of all prompt rows.
        mode: which rows of a prompt run through layers F.. (model specification, section 6).
        is_pruned: these decode rows run fewer experts (section 9); never prompt rows.
        has_bf16_mixing: hyper-connection weights are rounded to bf16 for these rows (3.2).
    """

    slot: int
    first: int
    count: int
    prompt_end: int | None = None
    mode: PrefillMode = "full"
    is_pruned: bool = False
    has_bf16_mixing: bool = False


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """One forward pass over the rows of several spans.

    Attributes:
        spans: at most one a slot.
        ids_T: tokens of all rows, span after span.
        history: per span the ids just before its first row, at most the last
            engram_max_ngram_size - 1 of them are read, oldest first; fewer at a request's start.
        logit_rows: rows (numbers into ids_T) whose logits are wanted.
    """

    spans: tuple[Span, ...]
    ids_T: list[int]
    history: tuple[tuple[int, ...], ...]
    logit_rows: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step gives back.

    Attributes:
        logits_RV: fp32 (fp64 for float64 models), one row an entry of `rows`.
        rows: the wanted rows that have logits; cone and replay skip others.
    """

    logits_RV: Tensor
    rows: list[int]


class DraftRequest(NamedTuple):
    """Draft what follows `token`, which will take `position`; all before it is processed."""

    slot: int
    position: int
    token: int


class DraftResult(NamedTuple):
    """Drafts of one request, for positions position+1 onwards.

    A tuple, as it is made while a device waits: a frozen dataclass costs three times as much.

    Attributes:
        tokens: dspark_block_size drafts.
        confidence: raw logits that the draft is accepted, given that all before it are.
    """

    tokens: list[int]
    confidence: list[float]
