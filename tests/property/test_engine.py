"""The engine as a state machine: any order of requests, rounds and cancellations.

One oracle: the reply of the same request, serial and alone. No slot or session is ever lost, every
request gets exactly one last word.
"""

import dataclasses

from hypothesis import HealthCheck, settings
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
from twinspark.errors import CapacityError
from twinspark.messages import GenerateRequest, Sampling
from twinspark.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(small_tokenizer_json())
ENDS = {"end_id": TOKENIZER.eos_id, "end_bias": 6.0}
CONTEXT = 64

requests = st.builds(
    lambda prompt, room, **rule: (
        tuple(prompt), {**rule, "max_tokens": min(room, CONTEXT - len(prompt))}
    ),
    prompt=st.lists(st.integers(14, 340), min_size=1, max_size=40),
    room=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 3),
    draft=st.booleans(),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), ("e",), ("th", "\n")]),
)  # fmt: skip


def alone(request):
    sampling = dataclasses.replace(request.sampling, draft=False)
    engine = Engine(FakeModel(**ENDS), TOKENIZER, EngineConfig(slots=1, max_context_tokens=CONTEXT))
    replies = run_all(engine, [dataclasses.replace(request, sampling=sampling)])
    return replies.summary(request.request_id)


class EngineMachine(RuleBasedStateMachine):
    open_ids = Bundle("open_ids")

    @initialize(
        slots=st.integers(1, 3), chunk=st.integers(1, 9), queue=st.integers(0, 3),
        rows=st.integers(1, 6),
    )  # fmt: skip
    def start(self, slots, chunk, queue, rows):
        self.engine = Engine(
            FakeModel(**ENDS), TOKENIZER,
            EngineConfig(slots=slots, prefill_chunk=chunk, queue_size=queue,
                         max_window_rows=rows, max_context_tokens=CONTEXT),
        )  # fmt: skip
        self.slots = slots
        self.replies, self.requests, self.cancelled = Replies(), {}, set()

    @rule(target=open_ids, asked=requests)
    def submit(self, asked):
        prompt, sampling = asked
        request = GenerateRequest(
            request_id=f"r{len(self.requests)}", prompt_ids=prompt, sampling=Sampling(**sampling)
        )
        had_room = self.engine.has_room
        try:
            self.engine.submit(request)
        except CapacityError:
            assert not had_room
            return multiple()
        assert had_room
        self.requests[request.request_id] = request
        return request.request_id

    @rule(request_id=consumes(open_ids))
    def cancel(self, request_id):
        self.engine.cancel(request_id)
        self.cancelled.add(request_id)

    @rule(times=st.integers(1, 5))
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
        assert self.engine.status.slots_free == self.slots
        assert self.replies.last.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            expected, last = alone(request), self.replies.last[request_id]
            if last.reason == "cancelled":
                assert request_id in self.cancelled
                tokens = tuple(self.replies.tokens.get(request_id, ()))
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
