"""Random companies of requests, and what each reply must be: the one it has alone.

The strategies and the comparison of every oracle, on the CPU (`tests/property/test_oracle.py`), a
GPU (`tests/gpu/test_companies.py`) and two (`tests/multigpu/test_pair_companies.py`).
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from time import perf_counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from twinspark.errors import CapacityError
from twinspark.messages import Failed, Finished, GenerateRequest, PromptScores, Sampling, TokenDelta

rules = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.8, 1.3])},
    optional={
        "top_p": st.sampled_from([0.5, 1.0]),
        "top_k": st.sampled_from([5]),
        "min_p": st.sampled_from([0.05]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.7]),
        "repetition_penalty": st.sampled_from([1.3]),
        "logit_bias": st.sampled_from([((20, 3.0), (33, -100.0))]),
        "min_tokens": st.sampled_from([4]),
        "banned_ids": st.sampled_from([(40, 41, 42)]),
        "logprobs": st.sampled_from([0, 3]),
        "ignore_eos": st.just(True),
        "choice_index": st.just(1),
    },
)
NAMES = ("bounded_replay", "expert_pruning", "bf16_hyper_connections")
ticks = st.none() | st.lists(st.sampled_from([0.0, 0.0005, 0.003, 0.04]), min_size=1, max_size=5)
cancels = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=2)


def clock_of(steps):
    """A clock that goes on by these steps, in turn, whenever it is looked at; None is a real one.

    What pieces and rounds take is then anything, and so is how pieces are cut.
    """
    if steps is None:
        return perf_counter
    times = itertools.accumulate(itertools.cycle(steps))
    return lambda: next(times)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Where companies meet.

    Attributes:
        context: positions a request may take.
        lengths: of prompts, around the edges of pages, windows and pieces.
        document: ids of a prompt by its length and a salt; one salt's are beginnings of another's.
        alone: what a request's reply must be, as `summary` tells it.
    """

    context: int
    lengths: Sequence[int]
    document: Callable[[int, int], Sequence[int]]
    alone: Callable[[GenerateRequest], tuple]

    @property
    def length(self):
        """Of a prompt: an edge, or anything."""
        return st.sampled_from(self.lengths) | st.integers(1, max(self.lengths) + 5)

    @property
    def companies(self):
        """Requests with the rounds they come in; later ones come later, with prefixes to share."""

        @st.composite
        def found(draw):
            company, at = [], 0
            for number in range(draw(st.integers(2, 7))):
                at += draw(st.sampled_from([0, 0, 3, 10, 40]))
                earlier = [request for request, _ in company]
                company.append((self._request(draw, number, earlier), at))
            return tuple(company)

        return found()

    def _request(self, draw, number, earlier):
        """Mostly the beginning of one document, or the next turn of an earlier one; else anything.

        A turn begins with an earlier prompt and what its reply is, or a part of that.
        """
        kind = draw(st.sampled_from(["same", "same", "turn", "turn", "any"]))
        plain = [r for r in earlier if not r.approximations and not r.cache_salt]
        names, salt = (), ""
        if kind == "turn" and plain:
            before = draw(st.sampled_from(plain))
            reply = self.alone(before)[0]
            ids = [*before.prompt_ids, *reply[: draw(st.integers(0, len(reply)))]]
            ids += self.document(draw(st.integers(1, 20)), 7)
            ids = ids[: self.context - 24]
        elif kind == "any":
            length = draw(self.length)
            ids = list(self.document(length, draw(st.integers(0, 1))))
            fork = draw(st.none() | st.integers(0, length))
            if fork is not None:
                ids[fork:] = self.document(length, 7)[fork:]
            names = tuple(sorted(draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True))))
            salt = draw(st.sampled_from(["", "b"]))
        else:
            ids = list(self.document(draw(self.length), 0))
        marks = draw(st.lists(st.integers(1, max(1, len(ids) - 1)), max_size=2, unique=True))
        return GenerateRequest(
            request_id=f"r{number}",
            prompt_ids=tuple(ids),
            sampling=Sampling(
                seed=number, max_tokens=draw(st.integers(4, 24)), **draw(rules)
            ),
            checkpoint_at=tuple(sorted(m for m in marks if m < len(ids))),
            approximations=names,
            cache_salt=salt,
            return_token_ids=True,
        )  # fmt: skip


def serial(request):
    """The same request without drafts, saved prefixes and checkpoints."""
    sampling = dataclasses.replace(request.sampling, draft=False)
    return dataclasses.replace(request, sampling=sampling, reuse=False, checkpoint_at=())


def summary(events):
    """What must not depend on anything but the request."""
    tokens = [t for e in events if isinstance(e, TokenDelta) for t in e.token_ids]
    scores = [s for e in events if isinstance(e, TokenDelta) for s in e.scores]
    prompt_scores = [s for e in events if isinstance(e, PromptScores) for s in e.scores]
    last = events[-1]
    if isinstance(last, Failed):
        return ("failed", last.code)
    assert isinstance(last, Finished)
    return (tokens, scores, prompt_scores, last.reason, last.cause, last.stats.token_sha)


def reply_alone(engine, request):
    """The summary of a request that nothing is beside."""
    engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    return summary(events)


def compare(engine, company, cancelled, alone, counts=None):
    """Submit at the given rounds, cancel at others; every reply equals the oracle's.

    Args:
        engine: with nothing open.
        company: requests with their rounds.
        cancelled: (place of a request, round).
        alone: of `Scene`.
        counts: a Counter of what happened, added to.
    """
    counts = collections.Counter() if counts is None else counts
    events = {r.request_id: [] for r, _ in company}
    waiting = sorted(company, key=lambda pair: pair[1])
    number = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1] <= number:
            request = waiting.pop(0)[0]
            try:
                engine.submit(request)
            except CapacityError as error:
                pytest.fail(f"refused: {error}")
        for index in (c for c, at in cancelled if at == number and c < len(company)):
            engine.cancel(company[index][0].request_id)
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_integrity()
        counts["cuts"] += engine._scheduler._begun is not None  # pieces stand between two layers
        number += 1
        assert number < 5000
    last = [events[r.request_id][-1] for r, _ in company]
    counts["hits"] += sum(e.stats.cached_tokens > 0 for e in last if isinstance(e, Finished))
    counts["kept drafts"] += sum(e.stats.accepted for e in last if isinstance(e, Finished))
    counts["runs"] += 1
    for request, _ in company:
        found, wanted = summary(events[request.request_id]), alone(request)
        if found[3] == "cancelled":
            assert found[0] == wanted[0][: len(found[0])]
        else:
            assert found == wanted


def examples(count):
    """Settings of a test that runs whole engines."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )
