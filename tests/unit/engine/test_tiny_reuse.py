"""Going on from saved state on the real forward pass: TINY, every layer kind, bit for bit."""

import numpy as np
import pytest
from tests import tiny

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.messages import Admitted, GenerateRequest, Sampling, TokenDelta
from twinspark.model.loading import load_model

TOKEN_MAP = np.array([tiny.token_map(i) for i in range(512)])
PAGE = 16


@pytest.fixture(scope="module")
def model():
    return load_model(tiny.exl3_path(), token_map=TOKEN_MAP)


def ask(ids, *, marks=()):
    return GenerateRequest(
        request_id="a", prompt_ids=tuple(ids), checkpoint_at=marks,
        sampling=Sampling(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True, logprobs=0),
    )  # fmt: skip


def new_engine(model, tokenizer):
    config = EngineConfig(slots=2, max_context_tokens=96, page_tokens=PAGE, prefill_chunk=33)
    return Engine(model, tokenizer, config)


def serve(engine, request):
    """Tokens with the bits of their scores, and cached tokens."""
    events = []
    engine.submit(request)
    while engine.has_work:
        events += engine.step()
    engine.check_integrity()
    deltas = [e for e in events if isinstance(e, TokenDelta)]
    tokens = [token for e in deltas for token in e.token_ids]
    scores = [score for e in deltas for score in e.scores]
    return (tokens, scores), next(e.cached_tokens for e in events if isinstance(e, Admitted))


def test_resumed_replies_equal_fresh_ones(model, small_tokenizer):
    """Inside a page and a ratio-2 pair, at a prompt's end and at a reply's."""
    first = list(tiny.prompt(2 * PAGE + 6))
    engine = new_engine(model, small_tokenizer)
    cold, none = serve(engine, ask(first))
    same, whole = serve(engine, ask(first))
    assert (none, whole) == (0, len(first) - 1) and same == cold
    turn = ask([*first, *cold[0], 40, 41], marks=(2 * PAGE + 3,))
    warm, cached = serve(engine, turn)
    fresh, _ = serve(new_engine(model, small_tokenizer), turn)
    assert warm == fresh and cached == len(first) + len(cold[0]) - 1
