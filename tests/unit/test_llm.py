"""The library's front door, on a fake model: text in and out, streams, threads, endings."""

import gc
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.fake_model import FakeModel

from twinspark import LLM, Sampling
from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.engine.startup import LoadedEngine
from twinspark.errors import CapacityError, ConfigError, EngineDied, RequestError
from twinspark.messages import (
    Admitted,
    EngineStatus,
    Failed,
    Finished,
    Form,
    PromptScores,
    ReplyStats,
    TokenDelta,
    TokenScore,
    Waiting,
)

CHAT = [{"role": "user", "content": "Say something."}]
RULE = Sampling(temperature=0.9, seed=7, max_tokens=20)


@pytest.fixture
def make_llm(small_tokenizer):
    def make(*, model=None, **settings):
        settings = {"max_context_tokens": 256, "slots": 2, **settings}
        engine = Engine(model or FakeModel(), small_tokenizer, EngineConfig(**settings))
        loaded = LoadedEngine(
            engine=engine, tokenizer=small_tokenizer, model_name="fake", load_seconds=0.0
        )
        return LLM.from_engine(loaded)

    return make


def test_stream_gives_the_pieces_of_the_reply(make_llm, small_tokenizer):
    llm = make_llm()
    stream = llm.stream("def fib(n):", RULE)
    pieces = list(stream)
    assert len(pieces) > 3 and all(pieces)
    assert "".join(pieces) == stream.reply.text == llm.generate("def fib(n):", RULE).text
    reply = stream.reply
    assert reply.finish_reason in ("stop", "length") and reply.stats.seed == 7
    assert len(reply.token_ids) == reply.stats.completion_tokens <= 20
    text = small_tokenizer.decode(reply.token_ids)
    assert reply.text in (text, text.replace("</think>", ""))


def test_the_prompt_is_bos_and_plain_text(make_llm, small_tokenizer):
    llm = make_llm()
    eos = small_tokenizer.token_text(small_tokenizer.eos_id)
    assert llm.generate(f"a{eos}b", RULE).stats.prompt_tokens == 1 + len(
        small_tokenizer.encode_plain(f"a{eos}b")
    )
    with pytest.raises(RequestError, match="surrogate"):
        llm.generate("\ud800")


def test_generate_many_equals_one_by_one(make_llm):
    llm = make_llm(queue_size=1)
    prompts = [f"prompt number {n}" for n in range(9)]
    rules = [Sampling(temperature=0.8, seed=n, max_tokens=12) for n in range(9)]
    together = llm.generate_many(prompts, rules)
    alone = [llm.generate(p, r) for p, r in zip(prompts, rules, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.text for r in together] == [r.text for r in alone]


def test_interleaved_streams_do_not_disturb_each_other(make_llm):
    llm = make_llm()
    rules = [Sampling(seed=n, max_tokens=20) for n in range(3)]
    streams = [llm.stream(f"text {n}", rule) for n, rule in enumerate(rules)]
    texts = ["", "", ""]
    open_streams = [0, 1, 2]
    while open_streams:
        for n in list(open_streams):
            piece = next(streams[n], None)
            if piece is None:
                open_streams.remove(n)
            else:
                texts[n] += piece
    assert texts == [llm.generate(f"text {n}", rule).text for n, rule in enumerate(rules)]


def test_threads_share_an_engine(make_llm):
    llm = make_llm()
    texts = {}

    def work(n):
        texts[n] = llm.generate(f"text {n}", Sampling(seed=n, max_tokens=20)).text

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: llm.generate(f"text {n}", Sampling(seed=n, max_tokens=20)).text
                     for n in range(6)}  # fmt: skip


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_separates_reasoning_from_the_answer(thinking, make_llm, small_tokenizer):
    model = FakeModel(end_id=small_tokenizer.end_think_id, end_bias=6.0)
    llm = make_llm(model=model)
    rule = Sampling(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
    pieces = list(llm.chat_stream(CHAT, rule, thinking=thinking))
    reply = llm.chat(CHAT, rule, thinking=thinking)
    assert "".join(p.content for p in pieces) == reply.text != ""
    assert "".join(p.reasoning for p in pieces) == reply.reasoning
    assert bool(reply.reasoning) == thinking


def test_without_sampling_the_packs_defaults_hold(make_llm):
    llm = make_llm(max_context_tokens=64)
    llm.default_sampling = Sampling(temperature=0.0, max_tokens=5)
    assert llm.generate("x").token_ids == llm.generate("x").token_ids


def test_a_closed_stream_frees_its_slot(make_llm):
    llm = make_llm(slots=1, queue_size=0)
    with llm.stream("x", Sampling(ignore_eos=True)) as stream:
        next(stream)
    assert llm.generate("y", RULE).text
    with pytest.raises(EngineDied):
        _ = stream.reply
    abandoned = llm.stream("x", Sampling(ignore_eos=True))
    next(abandoned)
    del abandoned
    gc.collect()
    assert llm.generate("y", RULE).text


def test_a_cancelled_stream_ends_as_usual(make_llm):
    stream = make_llm().stream("x", Sampling(ignore_eos=True, seed=1))
    first = next(stream)
    stream.cancel()
    reply = stream.reply
    assert reply.finish_reason == "cancelled" and reply.text.startswith(first)


def test_errors_come_as_exceptions_and_the_next_call_works(make_llm):
    llm = make_llm()
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("x", Sampling(temperature=-1))
    with pytest.raises(RequestError, match="256"):
        llm.generate("x" * 2000, RULE)
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}])
    assert llm.generate("x", RULE).text


def test_a_broken_engine_says_so_from_then_on(make_llm):
    model = FakeModel()
    model.broken_after = 2
    llm = make_llm(model=model)
    waiting = llm.stream("y", RULE)
    with pytest.raises(RuntimeError, match="on fire"):
        llm.generate("x", Sampling(ignore_eos=True))
    with pytest.raises(EngineDied):
        list(waiting)
    with pytest.raises(EngineDied):
        llm.generate("x", RULE)


def test_closing_ends_open_replies(make_llm):
    with make_llm() as llm:
        stream = llm.stream("x", RULE)
        next(stream)
    with pytest.raises(EngineDied, match="closed"):
        list(stream)
    with pytest.raises(EngineDied, match="closed"):
        llm.generate("x")


def test_closing_ends_the_other_ranks(small_tokenizer):
    """After the engine has let go of recordings, which NCCL waits for; not if a device is stuck."""
    closed, engine = [], ScriptedEngine()
    engine.close = lambda: closed.append("engine")
    team = SimpleNamespace(close=lambda: closed.append("team"), has_failed=False)
    loaded = LoadedEngine(
        engine=engine, tokenizer=small_tokenizer, model_name="fake", load_seconds=0.0, team=team
    )
    with LLM.from_engine(loaded):
        assert not closed
    assert closed == ["engine", "team"]
    team.has_failed = True
    loaded.close()
    assert closed[2:] == ["team"]


def test_unknown_settings_are_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="slots"):
        LLM("nowhere", slot=3)


class ScriptedEngine:
    """Plays one list of events for each request, one a step."""

    def __init__(self, *events):
        self.requests, self._events, self._left = [], events, []
        self.status = EngineStatus(running=0, waiting=0, rounds=3, slots_free=1)

    @property
    def has_work(self):
        return bool(self._left)

    def submit(self, request):
        self.requests.append(request)
        self._left += [replace(event, request_id=request.request_id) for event in self._events]

    def step(self):
        return [self._left.pop(0)]

    def cancel(self, request_id):
        pass

    def fail_all(self, reason, *, code):
        return []


def scripted(small_tokenizer, *events):
    engine = ScriptedEngine(*events)
    loaded = LoadedEngine(
        engine=engine, tokenizer=small_tokenizer, model_name="fake", load_seconds=0.0
    )
    return LLM.from_engine(loaded), engine


FINISHED = Finished(
    request_id="", reason="length", cause="deadline",
    stats=ReplyStats(prompt_tokens=3, completion_tokens=2),
)  # fmt: skip


def test_news_and_scores_become_part_of_the_reply(small_tokenizer):
    scores = [TokenScore(token_id=n, logprob=-float(n), top=((n, -1.0),)) for n in range(300, 305)]
    llm, _ = scripted(
        small_tokenizer,
        Waiting(request_id="", position=0, cause="slot"),
        Admitted(request_id=""),
        PromptScores(request_id="", first=1, scores=tuple(scores[:1])),
        PromptScores(request_id="", first=2, scores=tuple(scores[1:3])),
        TokenDelta(request_id="", token_ids=(303,), scores=(scores[3],)),
        TokenDelta(request_id="", token_ids=(304,), scores=(scores[4],)),
        FINISHED,
    )
    reply = llm.generate("x", Sampling(logprobs=1, prompt_logprobs=1))
    assert reply.token_ids == (303, 304) and reply.cause == "deadline"
    assert reply.scores == tuple(scores[3:]) and reply.prompt_scores == tuple(scores[:3])
    assert llm.status.rounds == 3


def test_request_options_reach_the_engine(small_tokenizer):
    llm, engine = scripted(small_tokenizer, FINISHED)
    options = {
        "priority": "background", "deadline_ms": 9, "max_queue_ms": 8, "checkpoint_at": (1,),
        "reuse": False, "cache_salt": "s", "approximations": ("expert_pruning",),
    }  # fmt: skip
    llm.generate("x", **options)
    llm.generate_many(["x"], **options)
    llm.chat(CHAT, thinking=False, **options)
    assert len(engine.requests) == 3
    for request in engine.requests:
        assert {name: getattr(request, name) for name in options} == options
    for wrong in ("temperature", "request_id", "in_reasoning"):
        with pytest.raises(RequestError, match=f"no request option {wrong}.*deadline_ms"):
            llm.generate("x", **{wrong: 1})
    assert len(engine.requests) == 3


@pytest.mark.parametrize(("kind", "code"), [("busy", "queue_full"), ("capacity", "memory")])
def test_refusals_for_want_of_room_say_when_to_try_again(small_tokenizer, kind, code):
    failed = Failed(request_id="", kind=kind, message="full", code=code, retry_after_s=2.5)
    llm, _ = scripted(small_tokenizer, failed)
    with pytest.raises(CapacityError, match="full") as caught:
        llm.generate("x")
    assert (caught.value.code, caught.value.retry_after_s) == (code, 2.5)


def test_tools_and_forms(small_tokenizer):
    tokenizer = small_tokenizer
    engine = Engine(
        FakeModel(end_id=tokenizer.eos_id, end_bias=2.0), tokenizer,
        EngineConfig(max_context_tokens=4096, slots=2),
    )  # fmt: skip
    llm = LLM.from_engine(
        LoadedEngine(engine=engine, tokenizer=tokenizer, model_name="fake", load_seconds=0.0)
    )
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
    }
    tools = [{"type": "function", "function": {"name": "roll", "parameters": parameters}}]
    rule = replace(RULE, max_tokens=300)
    stream = llm.chat_stream(
        CHAT, rule, thinking=False,
        fields={"tools": tools, "tool_choice": "required", "parallel_tool_calls": False},
    )  # fmt: skip
    pieces = list(stream)
    (call,) = stream.reply.calls
    assert call.name == "roll" and json.loads(call.arguments)["n"] in range(10)
    assert stream.reply.cause == "calls" and stream.reply.text == ""
    assert "".join(c.arguments for piece in pieces for c in piece.calls) == call.arguments
    reply = llm.chat(CHAT, rule, thinking=False, fields={"guided_choice": ["yes", "no"]})
    assert reply.text in ("yes", "no") and reply.cause == "constraint" and reply.calls == ()
    reply = llm.generate("x", rule, form=Form(grammar="start: /[0-9]{4}/"))
    assert reply.text.isdecimal() and len(reply.text) == 4
    with pytest.raises(RequestError, match="does not compile"):
        llm.generate("x", rule, form=Form(grammar="start: missing"))
