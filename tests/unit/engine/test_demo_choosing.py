"""Choosing on the demo pack: budgets and scores are the same drafted, serial and in company."""

import dataclasses

import pytest
from tests.fake_model import Replies

from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.core import Engine
from twinspark.messages import GenerateRequest, Sampling, TokenDelta
from twinspark.model.loading import load_model
from twinspark.text.reply import ReplyText
from twinspark.text.template import render_request
from twinspark.text.tokenizer import Tokenizer

ASKED = (
    ("Count from one to ten.", {"temperature": 0.0, "logprobs": 5}),
    ("Tell me about the sea.", {"temperature": 0.9, "frequency_penalty": 0.8, "logprobs": 0}),
    ("What is the capital of France?", {"temperature": 0.0, "thinking_budget": 6, "logprobs": 2}),
    ("Write a Python function that adds two numbers.",
     {"temperature": 0.7, "repetition_penalty": 1.2, "min_tokens": 12, "logprobs": 1}),
)  # fmt: skip
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(demo_pack_path() / "tokenizer.json")


@pytest.fixture(scope="module")
def run(tokenizer):
    model = load_model(demo_pack_path())

    def run(requests, **settings):
        config = EngineConfig(max_context_tokens=256, prefill_chunk=24, **settings)
        engine, replies, scores = Engine(model, tokenizer, config), Replies(), {}
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenDelta):
                    scores.setdefault(event.request_id, []).extend(event.scores)
                if type(event).__name__ in ("TokenDelta", "Finished", "Failed"):
                    replies.take([event])
        return {r: (replies.summary(r), scores[r]) for r in replies.last}

    return run


@pytest.fixture(scope="module")
def requests(tokenizer):
    found = []
    for number, (question, sampling) in enumerate(ASKED):
        prompt = render_request({"messages": [{"role": "user", "content": question}]})
        found.append(
            GenerateRequest(
                request_id=f"r{number}",
                prompt_ids=tuple(prompt.encode(tokenizer)),
                sampling=Sampling(seed=number, max_tokens=NUM_TOKENS, **sampling),
                in_reasoning=prompt.in_reasoning,
            )
        )
    return found


def undrafted(request):
    sampling = dataclasses.replace(request.sampling, draft=False)
    return dataclasses.replace(request, sampling=sampling)


def test_scores_are_the_same_drafted_serial_and_in_company(run, requests):
    """Case R32, and I7 with penalties: tokens and every bit of every log-probability."""
    together = run(requests)
    for request in requests:
        alone = run([undrafted(request)], slots=1)
        assert alone[request.request_id] == together[request.request_id]
        summary, scores = alone[request.request_id]
        assert [score.token_id for score in scores] == list(summary[0])
        assert all(len(score.top) == request.sampling.logprobs for score in scores)
        assert all(score.logprob <= 0 for score in scores)
        assert any(score.logprob < 0 for score in scores)
        if request.sampling.temperature == 0 and request.sampling.thinking_budget is None:
            assert [score.top[0][0] for score in scores] == list(summary[0])


def test_a_thinking_budget_leaves_room_for_the_answer(run, requests, tokenizer):
    """Case R52, at several budgets and temperatures, drafted and not."""
    base = requests[2]
    for budget in (0, 4):
        sampling = {"temperature": budget / 8, "thinking_budget": budget, "logprobs": None}
        sampling = dataclasses.replace(base.sampling, **sampling)
        request = dataclasses.replace(base, sampling=sampling)
        found = run([request])
        assert found == run([undrafted(request)])
        ids = found["r2"][0][0]
        text = ReplyText.of(request, tokenizer)
        pieces = [text.feed(ids), text.finish()]
        assert text.reasoning_tokens <= budget and not text.in_reasoning
        assert "".join(piece.content for piece in pieces)
