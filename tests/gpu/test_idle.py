"""Idle time is measured, a round with drafts is two replays, and rounds are recorded ahead."""

import pytest

from twinspark.bench.device_idle import measure_idle
from twinspark.llm import LLM
from twinspark.messages import Sampling

pytestmark = pytest.mark.gpu


def test_rounds_and_their_drafts_are_timed_and_nothing_is_left_open():
    settings = {"device": "cuda", "slots": 2, "max_context_tokens": 2048}
    with LLM.demo(**settings, lookup=False) as llm:
        prompts = [llm.tokenizer.encode_plain(text) for text in ("def add(a, b):", "import os\n")]
        drafted = measure_idle(llm.engine, prompts, "draft passes", rounds=12)
        serial = measure_idle(llm.engine, prompts[:1], "no drafts", rounds=12)
        assert not llm.engine.has_work
        assert llm.generate("def add(a, b):", Sampling(max_tokens=8)).token_ids  # and it goes on
    with LLM.demo(**settings) as llm:
        copied = measure_idle(llm.engine, [prompts[0] * 4], "copies", rounds=12)
    assert (drafted.slots, serial.slots) == (2, 1) and drafted.rounds + drafted.left_out in (11, 12)
    assert 1 <= drafted.replays <= 3 and serial.replays == 1 and serial.rounds >= 10
    assert drafted.rows > 2 and drafted.copied == 0 and copied.copied > 0
    assert serial.rows == serial.tokens == 1 <= copied.tokens <= copied.rows
    for found in (drafted, serial, copied):
        assert 0 < found.busy_us < found.round_us and found.idle_us < found.round_us


def test_rounds_that_are_recorded_ahead_give_the_same_replies():
    prompts, sampling = ["def add(a, b):", "import os\n"], Sampling(seed=3, max_tokens=48)
    found = []
    for ahead in (False, True):
        with LLM.demo(device="cuda", slots=2, max_context_tokens=2048) as llm:
            prepared = 0
            while ahead and llm.engine.prepare():
                prepared += 1
            assert (prepared > 0) == ahead
            found.append([reply.token_ids for reply in llm.generate_many(prompts, sampling)])
    assert found[0] == found[1] and all(found[0])
