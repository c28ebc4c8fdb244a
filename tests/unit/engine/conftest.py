"""Requests and engines on the fake model."""

from time import perf_counter

import pytest
from tests.fake_model import FakeModel

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.messages import GenerateRequest, Sampling


@pytest.fixture
def make_engine(small_tokenizer):
    def make(*, model=None, drafter=None, clock=perf_counter, meter=None, **settings):
        settings = {"slots": 4, "prefill_chunk": 7, "max_context_tokens": 256, **settings}
        return Engine(
            model or FakeModel(), small_tokenizer, EngineConfig(**settings),
            drafter=drafter, clock=clock, meter=meter,
        )  # fmt: skip

    return make


@pytest.fixture
def make_request():
    def make(number=0, *, prompt_len=None, prompt=None, stop=(), in_reasoning=False, **sampling):
        length = (1, 2, 5, 13, 30, 8, 3, 21)[number % 8] if prompt_len is None else prompt_len
        ids = tuple((number * 31 + n * 7) % 300 + 14 for n in range(length))
        sampling = {"temperature": 0.8, "seed": 1000 + number, "max_tokens": 24, **sampling}
        return GenerateRequest(
            request_id=f"r{number}",
            prompt_ids=ids if prompt is None else tuple(prompt),
            sampling=Sampling(stop=tuple(stop), **sampling),
            in_reasoning=in_reasoning,
            return_token_ids=True,
        )

    return make
