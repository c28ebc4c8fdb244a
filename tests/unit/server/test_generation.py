"""Choices side by side: merged in order, failing and leaving together, counted once a prompt."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from twinspark.messages import GenerateRequest, ReplyStats, Sampling
from twinspark.server.generation import (
    Ended,
    Prepared,
    TextDelta,
    merged,
    seed_of,
    several,
    usage_of_all,
)

REQUEST = GenerateRequest(request_id="a", prompt_ids=(1, 2))


class Source:
    """A generator of parts that notes how it ended."""

    def __init__(self, choice: int, num_parts: int, fault: Exception | None = None) -> None:
        self.is_closed = False
        self._choice, self._num_parts, self._fault = choice, num_parts, fault

    async def parts(self) -> AsyncGenerator[Any, None]:
        try:
            for n in range(self._num_parts):
                await asyncio.sleep(0.001 * (self._choice + 1))
                yield TextDelta(self._choice, content=str(n))
            if self._fault is not None:
                raise self._fault
        finally:
            await asyncio.sleep(0)
            self.is_closed = True


def test_parts_of_a_choice_stay_in_order() -> None:
    sources = [Source(n, 5 + n) for n in range(4)]

    async def run() -> list[TextDelta]:
        return [part async for part in merged([source.parts() for source in sources])]

    found = asyncio.run(run())
    for n in range(4):
        assert [p.content for p in found if p.choice == n] == [str(k) for k in range(5 + n)]
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("fault", [ValueError("x"), RuntimeError("y")])
def test_the_first_failure_ends_all(fault: Exception) -> None:
    sources = [Source(0, 10_000), Source(1, 2, fault), Source(2, 10_000)]

    async def run() -> None:
        async for _ in merged([source.parts() for source in sources]):
            pass

    with pytest.raises(type(fault)):
        asyncio.run(run())
    assert all(source.is_closed for source in sources)


def test_leaving_early_closes_all() -> None:
    sources = [Source(n, 10_000) for n in range(3)]

    async def run() -> None:
        parts = merged([source.parts() for source in sources])
        await anext(parts)
        await parts.aclose()
        assert all(source.is_closed for source in sources)

    asyncio.run(run())


def test_a_reader_that_does_not_take_holds_the_sources_back() -> None:
    sources = [Source(n, 10_000) for n in range(2)]

    async def run() -> int:
        parts = merged([source.parts() for source in sources])
        first = int((await anext(parts)).content)
        await asyncio.sleep(0.1)
        newest = max([int((await anext(parts)).content) for _ in range(8)])
        await parts.aclose()
        return newest - first

    assert asyncio.run(run()) < 10


def test_choices_share_seed_and_prompt() -> None:
    assert several(REQUEST, 1) == (REQUEST,)
    first, second, third = several(REQUEST, 3)
    assert first.sampling.seed is not None
    assert first.sampling.seed == second.sampling.seed == third.sampling.seed
    assert [r.sampling.choice_index for r in (first, second, third)] == [0, 1, 2]
    assert [r.request_id for r in (first, second, third)] == ["a", "a-1", "a-2"]
    assert {r.prompt_ids for r in (first, second, third)} == {(1, 2)}


def test_seeds_of_prompts() -> None:
    (request,) = several(REQUEST, 1, is_reproducible=True)
    assert request.sampling.seed == seed_of((1, 2)) != seed_of((2, 1))
    given = GenerateRequest(request_id="a", prompt_ids=(1,), sampling=Sampling(seed=5))
    assert several(given, 1, is_reproducible=True)[0].sampling.seed == 5
    assert len({seed_of((n,)) for n in range(100)}) == 100


def ended(choice: int, prompt_tokens: int) -> Ended:
    stats = ReplyStats(
        prompt_tokens=prompt_tokens, completion_tokens=5, cached_tokens=1, drafted=4, accepted=3
    )
    return Ended(
        choice=choice, finish="stop", cause="end_token", stop_string=None, stats=stats,
        reasoning_tokens=2, is_empty=False, first_token_ms=1.0,
    )  # fmt: skip


def test_a_shared_prompt_counts_once() -> None:
    prepared = Prepared(requests=(REQUEST,) * 4, num_per_prompt=2)
    usage = usage_of_all(prepared, [ended(3, 20), ended(0, 10), ended(2, 20), ended(1, 10)])
    assert (usage.prompt_tokens, usage.cached_tokens) == (30, 2)
    assert (usage.completion_tokens, usage.reasoning_tokens) == (20, 8)
    assert (usage.drafted, usage.accepted) == (16, 12)
