"""The engine's promises on the real forward pass: TINY, every layer kind, bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch
from tests import tiny
from tests.fake_model import ForcedDrafter, Replies, run_all

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.messages import GenerateRequest, Sampling
from twinspark.model.loading import load_model

NUM_TOKENS = 8
LENGTHS = (1, 17, 40, 6)
RULES = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95})
TOKEN_MAP = np.array([tiny.token_map(i) for i in range(512)])


@pytest.fixture(scope="module")
def model():
    return load_model(tiny.exl3_path(), token_map=TOKEN_MAP)


@pytest.fixture(scope="module")
def make_engine(model, small_tokenizer):
    def make(*, drafter=None, **settings):
        settings = {"max_context_tokens": 128, "prefill_chunk": 16, **settings}
        return Engine(model, small_tokenizer, EngineConfig(**settings), drafter=drafter)

    return make


class Recorder:
    """The model, remembering the logits that each position of a slot gave last."""

    def __init__(self, model):
        self._model, self.config = model, model.config
        self.new_caches, self.draft = model.new_caches, model.draft
        self.logits, self.num_rows = {}, 0

    def forward(self, step, caches):
        out = self._model.forward(step, caches)
        places = [(s.slot, s.first + n) for s in step.spans for n in range(s.count)]
        for row, logits_V in zip(out.rows, out.logits_RV, strict=True):
            self.logits[places[row]] = logits_V.clone()
        self.num_rows += len(out.rows)
        return out


def request(number, *, draft=True, **sampling):
    rule = {**RULES[number % 2], "seed": 50 + number, "max_tokens": NUM_TOKENS, **sampling}
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(tiny.prompt(LENGTHS[number % 4], salt=number)),
        sampling=Sampling(ignore_eos=True, draft=draft, **rule),
    )


@pytest.fixture(scope="module")
def oracle(make_engine):
    """Serial, alone, in a fresh engine with other piece sizes; from the fewest settings."""
    found = {}
    for number in range(4):
        engine = make_engine(slots=1, prefill_chunk=64)
        replies = run_all(engine, [request(number, draft=False)])
        found[f"r{number}"] = replies.summary(f"r{number}")
    return found


def test_drafted_and_batched_replies_equal_serial_ones_alone(make_engine, oracle):
    replies = run_all(make_engine(), [request(n) for n in range(4)], arrivals=[2, 0, 1, 0])
    assert {i: replies.summary(i) for i in oracle} == oracle


@pytest.mark.parametrize("pattern", [[5], [0, 2], [1, 4, 0]], ids=str)
def test_forced_drafts_equal_serial(pattern, make_engine, oracle):
    truth = {50 + n: (LENGTHS[n], oracle[f"r{n}"][0]) for n in range(4)}
    drafter = ForcedDrafter(truth, pattern, vocab_size=512)
    replies = run_all(make_engine(drafter=drafter), [request(n) for n in range(4)])
    assert {i: replies.summary(i) for i in oracle} == oracle


@pytest.mark.parametrize("number", [0, 1])
def test_logits_after_rejections_are_those_of_a_run_that_never_drafted(
    number, model, small_tokenizer, oracle
):
    serial, drafted = Recorder(model), Recorder(model)
    config = EngineConfig(slots=1, max_context_tokens=128, prefill_chunk=16)
    run_all(Engine(serial, small_tokenizer, config), [request(number, draft=False)])
    truth = {50 + number: (LENGTHS[number], oracle[f"r{number}"][0])}
    drafter = ForcedDrafter(truth, [0, 1, 3, 0], vocab_size=512)
    run_all(Engine(drafted, small_tokenizer, config, drafter=drafter), [request(number)])
    assert len(serial.logits) == serial.num_rows == NUM_TOKENS < drafted.num_rows
    assert all(torch.equal(drafted.logits[place], row) for place, row in serial.logits.items())


def test_a_reused_slot_and_cancelled_neighbours_leave_no_trace(make_engine, oracle):
    engine, replies = make_engine(slots=2), Replies()
    gone = dataclasses.replace(request(2, max_tokens=40), request_id="gone")
    for each in (gone, *(request(n) for n in range(4))):
        engine.submit(each)
    for round_number in range(100):
        replies.take(engine.step())
        if round_number == 4:
            engine.cancel("gone")
        if not engine.has_work:
            break
    assert replies.last["gone"].reason == "cancelled"
    assert {i: replies.summary(i) for i in oracle} == oracle
