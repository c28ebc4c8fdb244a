"""Forms on an engine: compiled away from the rounds, kept, cancelled, and failing alone."""

import dataclasses
import resource
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from tests.fake_model import Replies
from tests.grammar_judge import D, Judge, block, call, form_of, parameter, tool

from twinspark.engine import grammar as grammar_module
from twinspark.engine.grammar import (
    MAX_CACHED_FORMS,
    CallsConstraint,
    FormCompiler,
    GrammarConstraint,
)
from twinspark.errors import RequestError
from twinspark.messages import CallSettings, Form
from twinspark.text.grammar import text_form

V = 364


@pytest.fixture(scope="module")
def compiler(small_tokenizer):
    return FormCompiler(small_tokenizer, V)


@pytest.fixture
def start(compiler):
    def start(text, starts="after_reasoning"):
        form = Form(grammar=text, starts=starts)
        compiled = compiler.compile(form)
        compiled.result()
        return compiler.constraint(form, compiled)

    return start


def drain(engine):
    replies = Replies()
    while engine.has_work:
        events = engine.step()
        wanted = ("TokenDelta", "Finished", "Failed")
        replies.take([event for event in events if type(event).__name__ in wanted])
        engine.check_integrity()
    return replies


def asked(make_request, number, text, **rest):
    return dataclasses.replace(make_request(number, max_tokens=60), form=Form(grammar=text), **rest)


def test_masks_are_those_of_the_library(start, small_tokenizer):
    judge = Judge.of(small_tokenizer)
    form = Form(grammar="start: /[a-f]{2,}/ /!?/")
    constraint = start(form.grammar)
    text = ""
    for letter in ("", "a", "b", "c", "!"):
        text += letter
        for token in small_tokenizer.encode_plain(letter):
            constraint.advance(token)
        mask_V = constraint.mask()
        assert mask_V.shape == (V,) and mask_V.dtype == np.bool_
        assert set(np.flatnonzero(mask_V)) == judge.allowed(form, text)
    assert constraint.is_finished


def test_a_model_may_have_fewer_or_more_ids_than_the_tokenizer(small_tokenizer):
    for vocab_size in (330, 500):
        form = Form(grammar="start: /(?s:.*)/")
        compiler = FormCompiler(small_tokenizer, vocab_size)
        compiled = compiler.compile(form)
        compiled.result()
        mask_V = compiler.constraint(form, compiled).mask()
        assert mask_V.shape == (vocab_size,) and mask_V.sum() > 200
        assert not mask_V[small_tokenizer.vocab_size :].any()


def test_the_end_token_only_where_the_form_is_complete(start, small_tokenizer):
    constraint = start("start: /ab+/")
    a, b = (small_tokenizer.encode_plain(letter)[0] for letter in "ab")
    assert not constraint.mask()[small_tokenizer.eos_id]
    constraint.advance(a)
    assert not constraint.mask()[small_tokenizer.eos_id]
    constraint.advance(b)
    assert constraint.mask()[small_tokenizer.eos_id] and not constraint.is_finished
    constraint.advance(small_tokenizer.eos_id)
    assert constraint.is_finished


def test_copies_go_their_own_way(start, small_tokenizer):
    a, b = (small_tokenizer.encode_plain(letter)[0] for letter in "ab")
    one = start('start: "ab" | "ba"')
    other = one.copy()
    one.advance(a)
    other.advance(b)
    assert set(np.flatnonzero(one.mask())) == {b} and set(np.flatnonzero(other.mask())) == {a}
    with pytest.raises(ValueError, match="does not take"):
        one.copy().advance(a)
    one.advance(b)
    assert one.is_finished and not other.is_finished


def test_calls_are_free_until_they_open(start, small_tokenizer):
    held = form_of(small_tokenizer, tools=[tool("f", {"a": {"type": "string"}}, strict=True)])
    constraint = start(held.form.grammar, "calls")
    assert isinstance(constraint, CallsConstraint)
    mark = small_tokenizer.special_id(D)
    for token in (*small_tokenizer.encode_plain("text </"), mark, mark,
                  *small_tokenizer.encode_plain("\n\n<")):  # fmt: skip
        assert constraint.mask() is None and not constraint.is_finished
        constraint.advance(token)
    ahead = constraint.copy()
    for each in (ahead, constraint):
        each.advance(mark)
        rest = " calls>\n" + block(call("f", parameter("a", "x")))
        for token in small_tokenizer.encode_full(rest):
            assert each.mask()[token]
            each.advance(token)
        assert each.is_finished


def test_compiled_forms_are_kept_within_a_number(small_tokenizer):
    compiler = FormCompiler(small_tokenizer, V)
    first = compiler.compile(Form(grammar='start: "0"'))
    for n in range(MAX_CACHED_FORMS - 1):
        compiler.compile(Form(grammar=f'start: "{n + 1}"'))
    assert compiler.compile(Form(grammar='start: "0"', starts="calls")) is first
    compiler.compile(Form(grammar='start: "x"'))
    compiler.compile(Form(grammar='start: "y"'))
    assert len(compiler._kept) == MAX_CACHED_FORMS
    assert compiler.compile(Form(grammar='start: "0"')) is first
    big = "start: " + " | ".join(f'"{n}"' for n in range(400_000))
    for n in range(3):
        compiler._pool.submit = lambda *_: Future()
        compiler.compile(Form(grammar=big + str(n)))
        assert sum(map(len, compiler._kept)) <= len(big) + 1 + 4 * (1 << 20)
    assert compiler._num_bytes == sum(map(len, compiler._kept))


def test_a_form_that_does_not_compile_fails_its_request_only(make_engine, make_request):
    engine = make_engine()
    requests = [
        asked(make_request, 0, "start: missing"),
        asked(make_request, 1, 'start: "ab" /[0-9]{3}/'),
        make_request(2),
        asked(make_request, 3, 'start: "a"\nstart: "b"'),
    ]
    for request in requests:
        engine.submit(request)
    replies = drain(engine)
    assert replies.last["r0"].kind == replies.last["r3"].kind == "request"
    assert replies.last["r0"].param == "form" and "missing" in replies.last["r0"].message
    assert (replies.last["r1"].cause, replies.last["r1"].reason) == ("constraint", "stop")
    assert replies.last["r2"].reason == "length"


def test_a_known_form_waits_for_nothing(slow, make_engine, make_request):
    engine = make_engine()
    engine.submit(asked(make_request, 0, "start: /a+b/"))
    assert [e for e in engine.step() if type(e).__name__ == "Admitted"] == []
    slow.set()
    drain(engine)
    slow.clear()
    engine.submit(asked(make_request, 1, "start: /a+b/"))
    assert [e.request_id for e in engine.step() if type(e).__name__ == "Admitted"] == ["r1"]


@pytest.fixture
def slow(monkeypatch):
    """Compilations that take until the event is set."""
    gate = threading.Event()
    compile_it = grammar_module.library_matcher

    def slowly(library, text):
        assert gate.wait(30)
        return compile_it(library, text)

    monkeypatch.setattr(grammar_module, "library_matcher", slowly)
    yield gate
    gate.set()


def test_others_go_on_while_a_form_is_compiled(slow, make_engine, make_request):
    engine = make_engine()
    engine.submit(asked(make_request, 0, "start: /a+b/"))
    engine.submit(make_request(1))
    replies = Replies()
    while "r1" not in replies.last:
        events = engine.step()
        replies.take([e for e in events if type(e).__name__ in ("TokenDelta", "Finished")])
    assert "r0" not in replies.last and engine.has_work
    slow.set()
    assert drain(engine).last["r0"].cause in ("constraint", "max_tokens")


def test_a_request_whose_form_is_compiled_can_be_cancelled(slow, make_engine, make_request):
    engine = make_engine()
    engine.submit(asked(make_request, 0, "start: /a+b/"))
    engine.submit(asked(make_request, 1, "start: /a+b/", deadline_ms=1))
    engine.submit(asked(make_request, 2, "start: /a+b/"))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(asked(make_request, 2, "start: /a+b/"))
    engine.step()
    engine.cancel("r0")
    replies = Replies()
    while len(replies.last) < 2:
        replies.take([e for e in engine.step() if type(e).__name__ == "Finished"])
    assert (replies.last["r0"].cause, replies.last["r1"].cause) == ("cancelled", "deadline")
    assert replies.last["r0"].stats.completion_tokens == 0
    failed = engine.fail_all("over", code="engine_ended")
    assert [event.request_id for event in failed] == ["r2"] and not engine.has_work


@pytest.mark.parametrize("fault", ["error", "panic"])
def test_what_a_compiler_raises_fails_that_request_only(
    fault, monkeypatch, make_engine, make_request
):
    def broken(library, text):
        raise (ValueError if fault == "error" else MemoryError)("broken")

    monkeypatch.setattr(grammar_module, "library_matcher", broken)
    engine = make_engine()
    engine.submit(asked(make_request, 0, "start: /a+b/"))
    engine.submit(make_request(1))
    replies = drain(engine)
    assert replies.last["r0"].kind == "engine" and "broken" in replies.last["r0"].message
    assert replies.last["r1"].reason == "length"


def test_r38_a_mask_that_fails_ends_its_reply_only(monkeypatch, make_engine, make_request):
    """The fifth mask of one request fails; those beside it are as they would be alone."""
    counts = {}
    mask = GrammarConstraint.mask

    def failing(self):
        counts[None] = counts.get(None, 0) + 1
        if counts[None] >= 5:
            self._matcher.consume_token(0)  # no form takes it: the matcher is broken from here on
        return mask(self)

    requests = [asked(make_request, 0, "start: /[a-f]{40,}/"), make_request(1), make_request(2)]
    alone = {r.request_id: submit_and_drain(make_engine(), r) for r in requests[1:]}
    monkeypatch.setattr(GrammarConstraint, "mask", failing)
    engine = make_engine()
    for request in requests:
        engine.submit(request)
    replies = drain(engine)
    failed = replies.last["r0"]
    assert failed.kind == "engine" and failed.code == "reply_failed"
    for request_id, expected in alone.items():
        assert replies.summary(request_id) == expected


def submit_and_drain(engine, request):
    engine.submit(request)
    return drain(engine).summary(request.request_id)


@pytest.mark.parametrize("parallel", [True, False])
def test_complete_calls_end_the_reply(parallel, make_engine, make_request, small_tokenizer):
    text = f"\n\n<{D} calls>\n" + block(call("f"), call("g"))
    ids = tuple(small_tokenizer.encode_full(text))
    one = tuple(small_tokenizer.encode_full(f"\n\n<{D} calls>\n" + call("f")))
    for calls, expected in ((CallSettings(parallel=parallel), "calls"), (None, "max_tokens")):
        request = dataclasses.replace(
            make_request(1, max_tokens=len(ids) + 5), forced_ids=ids, calls=calls
        )
        engine = make_engine()
        engine.submit(request)
        replies = drain(engine)
        last, reply = replies.last["r1"], replies.tokens["r1"]
        assert last.cause == expected
        if calls is not None:
            assert last.reason == "stop" and last.stop_string is None
            assert len(reply) == (len(ids) if parallel else len(one))


def test_calls_that_the_prompt_opened_end_too(make_engine, make_request, small_tokenizer):
    ids = tuple(small_tokenizer.encode_full(f"\n</{D} invoke>\n</{D} calls>"))
    request = dataclasses.replace(
        make_request(1), forced_ids=ids, calls=CallSettings(opened=True, called="f")
    )
    engine = make_engine()
    engine.submit(request)
    assert drain(engine).last["r1"].cause == "calls"


def test_stop_strings_do_not_act_inside_calls(make_engine, make_request, small_tokenizer):
    text = f"\n\n<{D} calls>\n" + block(call("f", parameter("a", "stop")))
    request = dataclasses.replace(
        make_request(1, stop=("stop",), max_tokens=200),
        forced_ids=tuple(small_tokenizer.encode_full(text)),
        calls=CallSettings(),
    )
    engine = make_engine()
    engine.submit(request)
    assert drain(engine).last["r1"].cause == "calls"


def test_r39_compiled_forms_take_bounded_memory(small_tokenizer):
    """Thousands of different schemas: memory levels off."""

    def resident_bytes():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    compiler = FormCompiler(small_tokenizer, V)
    before = 0
    for n in range(3000):
        keys = {f"key{n}_{k}": {"type": "string" if k % 2 else "integer"} for k in range(6)}
        form = text_form({"guided_json": {"type": "object", "properties": keys}}).form
        compiled = compiler.compile(form)
        compiled.result()
        compiler.constraint(form, compiled).mask()
        if n == 1000:
            before = resident_bytes()
    assert len(compiler._kept) <= MAX_CACHED_FORMS
    assert resident_bytes() - before < 2000 << 10  # 1 KB a form
