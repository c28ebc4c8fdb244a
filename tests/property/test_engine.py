"""The engine as a state machine: any order of requests, rounds, cancellations and deadlines.

One oracle: the reply of the same request, serial, alone, on a fresh engine. Prompts share prefixes,
lengths lie around page and window edges, pools are small, checkpoints come and go. No slot, page,
state or session is ever lost, every request gets exactly one last word.
"""

import dataclasses
import functools
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from tests.fake_model import FakeModel, Replies, run_all
from tests.small_tokenizer import small_tokenizer_json

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.errors import CapacityError, RequestError
from twinspark.messages import Failed, GenerateRequest, Sampling
from twinspark.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(small_tokenizer_json())
ENDS = {"end_id": TOKENIZER.eos_id, "end_bias": 6.0}
CONTEXT, PAGE = 96, 8
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 41, 48)
STATE, ENCODER_STATE = 100, 40  # bytes of the fake's states


def document(number, length):
    return tuple((number * 97 + n * 13 + n * n % 7) % 320 + 14 for n in range(length))


TAGS = st.sampled_from([
    *[{}] * 12,
    {"approximations": ("bounded_replay",)}, {"approximations": ("bounded_replay",)},
    {"approximations": ("bf16_hyper_connections",)}, {"approximations": ("expert_pruning",)},
    {"approximations": ("bounded_replay", "expert_pruning")},
    {"cache_salt": "b"}, {"reuse": False},
])  # fmt: skip


@st.composite
def requests(draw):
    """A piece of a document that most requests share, then perhaps something of its own."""
    length = draw(st.sampled_from(LENGTHS))
    fork = draw(st.sampled_from([None, None, 0, 8, 9, 15, 16, 23, 30]))
    ids = document(0, length)
    if fork is not None:
        ids = ids[:fork] + document(draw(st.integers(1, 2)), max(length - fork, 0))
    marks = draw(st.sampled_from([(), (), (7,), (8,), (9, 16), (17,), (24,)]))
    sampling = {
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.5])),
        "seed": draw(st.integers(0, 1)),
        "draft": draw(st.sampled_from([True, True, False])),
        "ignore_eos": draw(st.booleans()),
        "stop": draw(st.sampled_from([(), ("e",), ("th", "\n")])),
        "prompt_logprobs": draw(st.sampled_from([None] * 9 + [0])),
        "max_tokens": min(draw(st.sampled_from([1, 2, 5, 12, 24])), CONTEXT - len(ids)),
    }
    rest = {
        **draw(TAGS),
        "priority": draw(st.sampled_from(["foreground"] * 4 + ["background"])),
        "deadline_ms": draw(st.sampled_from([None] * 9 + [1, 9, 40])),
        "checkpoint_at": tuple(m for m in marks if m < len(ids)),
    }
    return ids, sampling, rest


@functools.cache
def alone(request):
    """The oracle: no drafts, company, pieces, pages or prefixes to speak of."""
    config = EngineConfig(
        slots=1, max_context_tokens=CONTEXT, prefill_chunk=CONTEXT, prefix_reuse=False
    )
    replies = run_all(Engine(FakeModel(**ENDS), TOKENIZER, config), [request])
    return replies.summary(request.request_id)


def oracle(request):
    sampling = dataclasses.replace(request.sampling, draft=False)
    return alone(
        dataclasses.replace(
            request, request_id="alone", sampling=sampling, deadline_ms=None, checkpoint_at=(),
            priority="foreground", reuse=False, cache_salt="",
        )
    )  # fmt: skip


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class EngineMachine(RuleBasedStateMachine):
    open_ids = Bundle("open_ids")

    @initialize(
        slots=st.integers(1, 3), chunk=st.sampled_from([64, 9, 8, 3, 1]), queue=st.integers(0, 3),
        rows=st.integers(1, 6), pool=st.sampled_from([None, 8 * PAGE, 11 * PAGE, 16 * PAGE]),
        spacing=st.sampled_from([PAGE, 11, 4096]), long_prompt=st.sampled_from([12, 32768]),
        states=st.sampled_from([1000, 1000, 5, 3, 1]), reuse=st.sampled_from([True] * 9 + [False]),
        from_top=st.booleans(),
        share=st.sampled_from([0.0, 0.5, 0.5, 0.9]),
        steps=st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.02]), min_size=1, max_size=4),
    )  # fmt: skip
    def start(
        self, slots, chunk, queue, rows, pool, spacing, long_prompt, states, reuse, from_top, share,
        steps,
    ):  # fmt: skip
        self.clock, self.model, self.slots = Clock(), FakeModel(**ENDS), slots
        config = EngineConfig(
            slots=slots, prefill_chunk=chunk, queue_size=queue, max_window_rows=rows,
            max_context_tokens=CONTEXT, page_tokens=PAGE, pool_tokens=pool,
            checkpoint_spacing=spacing, long_prompt_tokens=long_prompt,
            checkpoint_bytes=states * STATE, prefix_reuse=reuse, pages_from_top=from_top,
            fair_share=share,
        )  # fmt: skip
        self.engine = Engine(self.model, TOKENIZER, config, clock=self.clock)
        self.model.on_forward = self.tick
        self.steps = itertools.cycle(steps)
        self.replies, self.requests, self.cancelled = Replies(), {}, set()

    def tick(self):
        self.clock.now_s += next(self.steps)

    @rule(target=open_ids, asked=requests())
    def submit(self, asked):
        prompt, sampling, rest = asked
        request = GenerateRequest(
            request_id=f"r{len(self.requests)}", prompt_ids=prompt,
            sampling=Sampling(**sampling), **rest,
        )  # fmt: skip
        had_room, pool = self.engine.has_room, self.engine.status.pool_tokens
        try:
            self.engine.submit(request)
        except CapacityError:
            assert not had_room
            return multiple()
        except RequestError as error:
            assert error.code == "pool_too_small"
            slack = self.engine.config.max_window_rows + PAGE
            assert len(prompt) + request.sampling.max_tokens + slack > pool
            return multiple()
        assert had_room
        self.requests[request.request_id] = request
        return request.request_id

    @rule(target=open_ids, of=open_ids, own=st.integers(0, 9), room=st.integers(1, 12))
    def next_turn(self, of, own, room):
        """A prompt that goes on from what another request has said so far."""
        before = self.requests[of]
        prompt = before.prompt_ids + tuple(self.replies.tokens.get(of, ())) + document(2, own)
        prompt = prompt[: CONTEXT - room]
        rest = {
            "approximations": before.approximations,
            "checkpoint_at": (len(before.prompt_ids),) if own else (),
        }
        return self.submit((prompt, {"seed": 1, "max_tokens": room}, rest))

    @rule(request_id=consumes(open_ids))
    def cancel(self, request_id):
        self.engine.cancel(request_id)
        self.cancelled.add(request_id)

    @rule(times=st.sampled_from([1, 2, 3, 5, 9, 20, 40]))
    def step(self, times):
        for _ in range(times):
            self.replies.take(self.engine.step())

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.replies.take(self.engine.step())
            self.engine.check_integrity()
        status = self.engine.status
        assert status.slots_free == self.slots and status.running == status.waiting == 0
        assert status.pool_free_tokens + status.cached_tokens_held == status.pool_tokens
        assert self.replies.last.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            self.check_reply(request_id, request)

    def check_reply(self, request_id, request):
        expected, last = oracle(request), self.replies.last[request_id]
        tokens = tuple(self.replies.tokens.get(request_id, ()))
        if isinstance(last, Failed) or expected[0] == "failed":
            assert self.replies.summary(request_id) == expected
        elif last.reason == "cancelled":
            assert request_id in self.cancelled
            assert tokens == expected[0][: len(tokens)]
        elif last.cause == "deadline":
            assert request.deadline_ms is not None and last.reason == "length"
            assert tokens == expected[0][: len(tokens)]
        else:
            assert self.replies.summary(request_id) == expected


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@given(
    shared=st.integers(1, 60),
    own=st.integers(0, 30),
    spacing=st.sampled_from([3, 8, 11, 16]),
    chunk=st.sampled_from([5, 8, 96]),
    marks=st.lists(st.integers(1, 60), max_size=3, unique=True).map(sorted),
    names=st.sampled_from([(), (), (), ("bounded_replay",), ("expert_pruning",)]),
    states=st.sampled_from([1000, 2]),
)
@settings(max_examples=120, deadline=None)
def test_whatever_is_gone_on_from_the_reply_is_the_same(
    shared, own, spacing, chunk, marks, names, states
):
    """One prompt leaves its checkpoints; a second one forks off anywhere, marked anywhere."""
    config = EngineConfig(
        slots=1, max_context_tokens=CONTEXT, page_tokens=PAGE, prefill_chunk=chunk,
        checkpoint_spacing=spacing, checkpoint_bytes=states * STATE,
    )  # fmt: skip
    engine = Engine(FakeModel(**ENDS), TOKENIZER, config)
    first = document(0, 60)
    second = first[:shared] + document(1, own)
    for number, prompt in enumerate((first, second, second + document(2, 3), second)):
        request = GenerateRequest(
            request_id=f"r{number}", prompt_ids=prompt, approximations=names,
            sampling=Sampling(seed=1, max_tokens=3),
            checkpoint_at=tuple(m for m in marks if number and m < len(prompt)),
        )  # fmt: skip
        replies = run_all(engine, [request])
        assert replies.summary(f"r{number}") == oracle(request)
