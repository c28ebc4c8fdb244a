"""Every field of choosing on an engine: drafted, in company and under a form equal serial, alone.

The tokens, their log-probabilities and the way the reply ends, for any mixture of fields.
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_model import FakeModel, ForcedDrafter, Replies
from tests.form_constraints import FormEngine, Steps
from tests.small_tokenizer import small_tokenizer_json

from twinspark.config.engine import EngineConfig
from twinspark.messages import GenerateRequest, Sampling, TokenDelta
from twinspark.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(small_tokenizer_json())
V = FakeModel().config.vocab_size
END, END_THINK = TOKENIZER.eos_id, TOKENIZER.end_think_id
DIGITS = {i for i in range(V) if TOKENIZER.token_text(i).strip().isdecimal()}
LETTERS = {i for i in range(V) if TOKENIZER.token_text(i).isalpha()}
RESERVED = {*TOKENIZER.reserved_ids, *range(TOKENIZER.vocab_size, V)}
FORMS = {
    "": None,
    "digits": lambda: Steps(V, [DIGITS | RESERVED], repeats=True),
    "number": lambda: Steps(V, [DIGITS, DIGITS, {END, *DIGITS}], repeats=True),
    "phrase": lambda: Steps(V, [LETTERS, DIGITS, {20}, {21}, LETTERS]),
    "dead end": lambda: Steps(V, [LETTERS, LETTERS, DIGITS, RESERVED, LETTERS]),
}

ids = st.integers(0, V - 1)
tokens = st.lists(ids, max_size=4, unique=True)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "top_k": st.sampled_from([0, 3]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 2),
        "max_tokens": st.integers(1, 30),
        "stop": st.sampled_from([(), ("e",), ("t", "a")]),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "logit_bias": st.dictionaries(
            st.one_of(ids, st.sampled_from([END, END_THINK])), st.floats(-100, 100), max_size=4
        ).map(lambda d: tuple(d.items())),
        "min_tokens": st.integers(0, 12),
        "banned_ids": tokens.map(tuple),
        "allowed_ids": st.sampled_from([(), tuple({END, *DIGITS, *LETTERS})]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "thinking_budget": st.integers(0, 8),
        "choice_index": st.integers(0, 2),
    },
)
asked = st.tuples(samplings, st.booleans(), st.sampled_from(sorted(FORMS)))


def make_request(number, sampling, in_reasoning):
    sampling = {"seed": number, "max_tokens": 24, **sampling}
    sampling["min_tokens"] = min(sampling.get("min_tokens", 0), sampling["max_tokens"])
    banned = set(sampling.get("banned_ids", ())) - {END_THINK, 20, 21}
    sampling["banned_ids"] = tuple(banned)
    if sampling.get("allowed_ids"):
        sampling["allowed_ids"] += (END_THINK, 20, 21)
    if not in_reasoning:
        sampling.pop("thinking_budget", None)
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple((number * 31 + n * 7) % 300 + 14 for n in range(3 + 5 * number)),
        sampling=Sampling(**sampling),
        in_reasoning=in_reasoning,
    )


class Scored(Replies):
    def __init__(self):
        super().__init__()
        self.scores = {}

    def take(self, events):
        for event in events:
            if isinstance(event, TokenDelta):
                self.scores.setdefault(event.request_id, []).extend(event.scores)
                assert len(event.scores) in (0, len(event.token_ids))
        wanted = ("TokenDelta", "Finished", "Failed")
        super().take([event for event in events if type(event).__name__ in wanted])

    def whole(self, request_id):
        last = self.last[request_id]
        cause = getattr(last, "cause", None)
        return self.summary(request_id), cause, self.scores.get(request_id)


def run(requests, forms, **settings):
    model = FakeModel(end_id=END, end_bias=5.0)
    drafter = settings.pop("drafter", None)
    engine = FormEngine(
        model,
        TOKENIZER,
        EngineConfig(**{"slots": 4, "max_context_tokens": 128, "prefill_chunk": 7, **settings}),
        drafter=drafter,
        form=lambda request: (
            FORMS[forms[request.request_id]] and FORMS[forms[request.request_id]]()
        ),
    )
    replies = Scored()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        replies.take(engine.step())
        engine.check_integrity()
    return replies


def serial(request, forms):
    sampling = dataclasses.replace(request.sampling, draft=False)
    return run([dataclasses.replace(request, sampling=sampling)], forms, slots=1)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(asked, min_size=1, max_size=4), right=st.lists(st.integers(0, 5), min_size=1))
def test_drafted_and_in_company_equals_serial_and_alone(parts, right):
    requests = [make_request(n, sampling, inside) for n, (sampling, inside, _) in enumerate(parts)]
    forms = {request.request_id: parts[n][2] for n, request in enumerate(requests)}
    expected, truth = {}, {}
    for request in requests:
        alone = serial(request, forms)
        expected[request.request_id] = alone.whole(request.request_id)
        check_what_was_asked(request, alone, forms[request.request_id])
    together = run(requests, forms)
    for request in requests:
        assert together.whole(request.request_id) == expected[request.request_id]
    for request in requests:
        reply = expected[request.request_id][0][0]
        truth = {request.sampling.seed: (len(request.prompt_ids), reply)}
        forced = run([request], forms, drafter=ForcedDrafter(truth, right, vocab_size=V))
        assert forced.whole(request.request_id) == expected[request.request_id]


def check_what_was_asked(request, replies, form):
    sampling, request_id = request.sampling, request.request_id
    reply, last = replies.tokens[request_id], replies.last[request_id]
    assert not set(reply) & RESERVED, "reserved ids never leak"
    assert not set(reply) & set(sampling.banned_ids)
    assert not sampling.allowed_ids or set(reply) <= set(sampling.allowed_ids)
    scores = replies.scores[request_id]
    if sampling.logprobs is not None:
        assert [score.token_id for score in scores] == reply
        assert {len(score.top) for score in scores} == {sampling.logprobs}
    else:
        assert scores == []
    if END in reply and not sampling.ignore_eos and not form:
        assert len(reply) > sampling.min_tokens
    if last.cause == "stop_string":
        assert len(reply) > sampling.min_tokens
    budget = sampling.thinking_budget
    if budget is not None and len(reply) > budget and not {END} & set(reply):
        assert END_THINK in reply[: budget + 1]
    start = 0
    if request.in_reasoning:
        start = reply.index(END_THINK) + 1 if END_THINK in reply else len(reply)
    constraint = FORMS[form] and FORMS[form]()
    for token in reply[start:] if constraint else ():
        constraint.advance(token)  # raises where the form is broken
    if last.cause == "constraint":
        assert last.reason == ("stop" if constraint.is_finished else "length")


@pytest.mark.parametrize("form", ["digits", "number", "phrase", "dead end"])
def test_forms_end_as_they_say(form):
    request = make_request(1, {"ignore_eos": form == "digits"}, in_reasoning=False)
    replies = serial(request, {"r1": form})
    last, reply = replies.last["r1"], replies.tokens["r1"]
    expected = {
        "digits": ("length", "max_tokens", 24), "phrase": ("stop", "constraint", 5),
        "dead end": ("length", "constraint", 3),
    }  # fmt: skip
    if form == "number":
        assert (last.reason, last.cause) == ("stop", "end_token") and set(reply[:-1]) <= DIGITS
    else:
        assert (last.reason, last.cause, len(reply)) == expected[form]


def test_the_loop_guard_ends_a_reply_wherever_drafts_cut_it():
    stuck = {"logit_bias": ((30, 100.0),), "loop_guard": "gentle", "max_tokens": 190}
    request = make_request(0, stuck, in_reasoning=True)
    wide = {"max_context_tokens": 256}
    alone = run([request], {"r0": ""}, **wide, slots=1, draft=False)
    last = alone.last["r0"]
    assert (last.reason, last.cause, last.stats.completion_tokens) == ("length", "loop", 129)
    for right in ([5], [0, 3, 1]):
        truth = {0: (len(request.prompt_ids), [30] * 200)}
        drafter = ForcedDrafter(truth, right, vocab_size=V)
        assert run([request], {"r0": ""}, **wide, drafter=drafter).whole("r0") == alone.whole("r0")
    unguarded = make_request(0, {**stuck, "loop_guard": "off"}, in_reasoning=True)
    assert run([unguarded], {"r0": ""}, **wide).last["r0"].cause == "max_tokens"
