"""Companies of requests on the demo pack, for engines on GPUs; lengths are around its edges."""

import collections
import contextlib
import functools
import itertools

from hypothesis import given
from tests.companies import Scene, cancels, compare, examples, reply_alone, serial

from twinspark import LLM

CONTEXT, PAGE, PIECE = 448, 16, 96  # windows are of 64
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 256)
TEXT = "def add(a, b):\n    return a + b\n\nThe river of the old town was as long as a day. "
ENGINES = (
    {"slots": 3, "prefill_chunk": PIECE, "pool_tokens": PAGE * 64},
    {"slots": 4, "prefill_chunk": 33, "pool_tokens": PAGE * 28, "checkpoint_bytes": 0},
    {"slots": 2, "prefill_chunk": 256, "cache_format": "bf16", "lookup": False},
)
"""Enough pages and few, saved prefixes and none, both row formats; more pieces than one or none."""


@contextlib.contextmanager
def engines(device, chosen, *, ranks=1):
    """The engine under test, and the oracle: one slot, one rank, one piece, on the same device."""
    settings = {"device": device, "max_context_tokens": CONTEXT, "page_tokens": PAGE}
    lone = {**settings, "slots": 1, "prefill_chunk": 512, "lookup": False}
    with LLM.demo(**lone) as oracle, LLM.demo(**settings, **chosen, ranks=ranks) as llm:
        yield llm, oracle


def compare_companies(llm, oracle, count):
    """Random companies, one after another; what was reused and drafted is counted, and happened."""
    ids = oracle.tokenizer.encode_plain(TEXT)

    def document(length, salt):
        begin = salt * 5 % len(ids)
        return list(itertools.islice(itertools.cycle(ids), begin, begin + length))

    alone = functools.cache(lambda request: reply_alone(oracle.engine, serial(request)))
    scene = Scene(context=CONTEXT, lengths=LENGTHS, document=document, alone=alone)
    counts = collections.Counter()
    slots = llm.engine.status.slots_free

    @examples(count)
    @given(scene.companies, cancels)
    def any_company(company, cancelled):
        compare(llm.engine, company, cancelled, alone, counts)
        assert llm.engine.status.slots_free == slots

    any_company()
    assert counts["kept drafts"] >= counts["runs"] / 4
    return counts
