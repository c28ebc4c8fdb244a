"""What grammar masks cost: the library's own time and ours around it, token by token (S4).

Two copies of one matcher go along the same documents. One is asked by the library's cheapest call,
the other through `engine/grammar.py`, as replies are. Run it on an idle machine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from twinspark.engine.constraints import ConstrainedReply
from twinspark.engine.grammar import FormCompiler, GrammarConstraint, MaskBuffer
from twinspark.text.grammar import text_form
from twinspark.text.tokenizer import Tokenizer

ROUNDS = 3

_TICKET = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 120},
        "kind": {"enum": ["bug", "question", "feature", "chore"]},
        "priority": {"type": "integer", "minimum": 0, "maximum": 5},
        "mail": {"type": "string", "pattern": "^[a-z0-9.]+@[a-z0-9.]+$"},
        "due": {"type": ["string", "null"], "format": "date"},
        "labels": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
    },
    "required": ["title", "kind", "priority", "mail", "due", "labels", "steps"],
    "additionalProperties": False,
    "$defs": {
        "step": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "done": {"type": "boolean"},
                "inside": {"type": "array", "items": {"$ref": "#/$defs/step"}},
            },
            "required": ["text", "done"],
            "additionalProperties": False,
        }
    },
}
_TICKET_TEXT: dict[str, Any] = {
    "title": "The page is empty after a second login on the same day",
    "kind": "bug",
    "priority": 3,
    "mail": "ann.smith@example.org",
    "due": "2027-02-03",
    "labels": ["login", "caf\u00e9", "web"],
    "steps": [
        {"text": "Log in, then log out.", "done": True, "inside": []},
        {"text": "Log in again; the list stays white.", "done": False},
    ],
}
_CITIES = [f"city {n} of the north" for n in range(1000)]
DOCUMENTS: Sequence[tuple[Mapping[str, Any], Any]] = (
    (_TICKET, _TICKET_TEXT),
    ({"type": "object"}, {"any": {"keys": [1, 2.5, None, True]}, "more": "text that goes on"}),
    ({"type": "array", "items": {"enum": _CITIES}}, _CITIES[100:140:5]),
    (
        {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "string"}]}},
        [1, -2.5e3, "three", 4, "five and more words than one"],
    ),
)


@dataclass(frozen=True, kw_only=True)
class MaskFigures:
    """Times in microseconds a mask.

    Attributes:
        num_masks: that were measured.
        library: mean of the library alone; `library_p99` its 99th percentile.
        ours: the same through a constraint, as a reply asks; `ours_p99` likewise.
        ratio: of the means.
        advance: mean to take a token.
    """

    num_masks: int
    library: float
    library_p99: float
    ours: float
    ours_p99: float
    ratio: float
    advance: float


def measure_masks(tokenizer: Tokenizer, vocab_size: int, *, rounds: int = ROUNDS) -> MaskFigures:
    """Measure masks on documents of several schemas.

    Args:
        tokenizer: of a pack.
        vocab_size: ids that its model has.
        rounds: how often each document is gone along.
    """
    compiler = FormCompiler(tokenizer, vocab_size)
    nothing_V = np.zeros(vocab_size, np.bool_)
    library_size = max(vocab_size, tokenizer.vocab_size)
    buffer, bare_buffer = (MaskBuffer(vocab_size, library_size) for _ in range(2))
    library_s: list[float] = []
    ours_s: list[float] = []
    advance_s: list[float] = []
    for schema, document in DOCUMENTS:
        form = text_form({"guided_json": schema}).form
        assert form is not None
        matcher = compiler.compile(form).result()
        ids = tokenizer.encode_plain(json.dumps(document, ensure_ascii=False))
        for _ in range(rounds):
            bare = matcher.deep_copy()
            constraint = GrammarConstraint(matcher.deep_copy(), buffer)
            reply = ConstrainedReply(constraint, banned_V=nothing_V, is_asleep=False)
            for place, token in enumerate(ids[:-1], 1):
                start_s = perf_counter()
                bare.consume_token(token)
                consumed_s = perf_counter()
                bare.unsafe_compute_mask_ptr(bare_buffer.address, bare_buffer.num_bytes)
                masked_s = perf_counter()
                reply.advance(token, place)
                end_s = perf_counter()
                advance_s.append(consumed_s - start_s)
                library_s.append(masked_s - consumed_s)
                ours_s.append(end_s - masked_s - (consumed_s - start_s))
    return MaskFigures(
        num_masks=len(ours_s),
        library=1e6 * float(np.mean(library_s)),
        library_p99=1e6 * float(np.percentile(library_s, 99)),
        ours=1e6 * float(np.mean(ours_s)),
        ours_p99=1e6 * float(np.percentile(ours_s, 99)),
        ratio=float(np.mean(ours_s) / np.mean(library_s)),
        advance=1e6 * float(np.mean(advance_s)),
    )
