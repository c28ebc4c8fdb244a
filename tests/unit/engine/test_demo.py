"""The promises on the demo pack: real text, real drafts, the same bits however it runs."""

import dataclasses

import pytest
from tests.fake_model import ForcedDrafter, Replies, run_all

from twinspark import LLM, Sampling
from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.core import Engine
from twinspark.messages import GenerateRequest
from twinspark.model.loading import load_model
from twinspark.text.template import render_request
from twinspark.text.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Count from one to ten.",
    "Tell me about the sea.",
)
RULES = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 9})
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(demo_pack_path() / "tokenizer.json")


@pytest.fixture(scope="module")
def make_engine(tokenizer):
    model = load_model(demo_pack_path())

    def make(*, drafter=None, **settings):
        config = EngineConfig(**{"max_context_tokens": 256, "prefill_chunk": 24, **settings})
        return Engine(model, tokenizer, config, drafter=drafter)

    return make


@pytest.fixture(scope="module")
def requests(tokenizer):
    found = []
    for number in range(8):
        body = {"messages": [{"role": "user", "content": QUESTIONS[number % 4]}]}
        body["thinking"] = {"type": "disabled" if number < 4 else "enabled"}
        rule = {**RULES[number % 3], "seed": 90 + number, "max_tokens": NUM_TOKENS}
        found.append(
            GenerateRequest(
                request_id=f"r{number}",
                prompt_ids=tuple(render_request(body).encode(tokenizer)),
                sampling=Sampling(**rule),
                in_reasoning=number >= 4,
            )
        )
    return found


@pytest.fixture(scope="module")
def oracle(make_engine, requests):
    """Serial, alone, each in a fresh engine, with another piece size."""
    found = {}
    for request in requests:
        serial = dataclasses.replace(request.sampling, draft=False)
        engine = make_engine(slots=1, prefill_chunk=100)
        replies = run_all(engine, [dataclasses.replace(request, sampling=serial)])
        found[request.request_id] = replies.summary(request.request_id)
    return found


def test_eight_streams_equal_the_same_eight_alone(make_engine, requests, oracle):
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    arrivals = [0, 0, 3, 1, 0, 2, 5, 1]
    replies = run_all(make_engine(), [requests[n] for n in order], arrivals=arrivals)
    assert {i: replies.summary(i) for i in oracle} == oracle
    stats = [event.stats for event in replies.last.values()]
    assert sum(s.accepted for s in stats) > 0


def test_cancellations_in_between_change_nothing(make_engine, requests, oracle):
    engine, replies = make_engine(slots=3), Replies()
    for number in range(4):
        long = dataclasses.replace(requests[number].sampling, max_tokens=90, ignore_eos=True)
        engine.submit(dataclasses.replace(requests[number], request_id=f"x{number}", sampling=long))
        engine.submit(requests[number])
    round_number = 0
    while engine.has_work:
        replies.take(engine.step())
        engine.cancel(f"x{round_number}")
        round_number += 1
    for number in range(4):
        assert replies.last[f"x{number}"].reason == "cancelled"
        assert replies.summary(f"r{number}") == oracle[f"r{number}"]
    assert engine.status.slots_free == 3


@pytest.mark.parametrize("pattern", [[5], [0, 3, 1]], ids=["all_right", "some_right"])
def test_forced_drafts_equal_serial(pattern, make_engine, requests, oracle):
    truth = {90 + n: (len(requests[n].prompt_ids), oracle[f"r{n}"][0]) for n in range(4)}
    drafter = ForcedDrafter(truth, pattern, vocab_size=4096)
    replies = run_all(make_engine(drafter=drafter), requests[:4])
    assert all(replies.summary(f"r{n}") == oracle[f"r{n}"] for n in range(4))


def test_the_library_runs_it_and_it_knows_a_capital():
    with LLM.demo(slots=1, max_context_tokens=256) as llm:
        reply = llm.chat(
            [{"role": "user", "content": QUESTIONS[0]}], Sampling(temperature=0.0, max_tokens=40),
            thinking=False,
        )  # fmt: skip
        assert "Paris" in reply.text and reply.finish_reason == "stop"
        stream = llm.stream("def add(a, b):\n", Sampling(max_tokens=6, seed=7))
        assert "".join(stream) == stream.reply.text and stream.reply.stats.seed == 7
