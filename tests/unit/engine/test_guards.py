"""The loop guard: ends exact repetition, leaves what people ask for alone (case R64)."""

import itertools

import numpy as np
import pytest

from twinspark.engine.guards import (
    MAX_PERIOD,
    MIN_COPIES,
    MIN_EQUAL_TOKENS,
    MIN_REPEATED_TOKENS,
    LoopGuard,
)


def stops_at(tokens):
    """Tokens fed when the guard speaks, or None."""
    guard = LoopGuard()
    return next((n for n, token in enumerate(tokens, 1) if guard.feed(token)), None)


def expected_stop(period):
    needed = max(MIN_REPEATED_TOKENS, (MIN_COPIES - 1) * period)
    return period + (MIN_EQUAL_TOKENS if period == 1 else needed)


@pytest.mark.parametrize("period", [1, 2, 3, 22, 170, 171, 200, 500, MAX_PERIOD])
@pytest.mark.parametrize("before", [0, 5, 3000])
def test_a_block_written_again_and_again(period, before):
    rng = np.random.default_rng(period)
    block = (1000 + rng.permutation(period)).tolist()
    text = [*rng.integers(0, 900, before).tolist(), *block * 700]
    assert stops_at(text) == before + expected_stop(period)


def test_the_loops_of_the_case():
    assert stops_at(list(range(22)) * 50) == 22 + 768
    assert stops_at([7] * 200) == 129
    characters = np.random.default_rng(0).integers(32, 127, 800).tolist()  # a token each
    assert stops_at(characters * 10) == 4 * 800
    assert stops_at(characters[:200] * 10) == 200 + 768


def test_longer_blocks_than_the_longest_are_not_seen():
    assert stops_at(list(range(MAX_PERIOD + 1)) * 12) is None


def test_every_alignment_of_the_buffer_compares_alike():
    block = list(range(100, 140))
    for before in range(MAX_PERIOD - 8, MAX_PERIOD + 8):
        text = [*range(10_000, 10_000 + before), *block * 30]
        assert stops_at(text) == before + expected_stop(40)


def legal(tokenizer):
    zeros = "\n".join([", ".join(["0"] * 16)] * 16)
    art = "\n".join(["+" + "-" * 78 + "+"] + ["|" + " " * 78 + "|"] * 3 + ["+" + "-" * 78 + "+"])
    table = "\n".join(f"| {n} | 0 | 0 | 0 | 0 |" for n in range(200))
    counting = ", ".join(map(str, range(1, 201)))
    song = "".join(f"{n} green bottles, hanging on the wall. " for n in range(99, 0, -1))
    code = "\n".join(f"    assert f({n}) == {n * n}" for n in range(150))
    return {
        "zeros": zeros, "art": art, "table": table, "counting": counting, "song": song,
        "code": code, "row of zeros": "0 " * 60, "laughter": "ha" * 40,
    }  # fmt: skip


@pytest.mark.parametrize("name", legal(None))
def test_legal_repetition_passes(name, small_tokenizer):
    text = legal(None)[name]
    assert stops_at(small_tokenizer.encode_plain(text)) is None
    assert stops_at(text.encode()) is None  # one token a character


def test_one_changing_token_is_no_loop():
    rows = ([1, 2, 3, 4, 5, 1000 + n, 6] for n in range(2000))
    assert stops_at(itertools.chain.from_iterable(rows)) is None


def test_a_loop_that_is_broken_in_time_passes():
    block = list(range(30))
    almost = (block * 40)[: expected_stop(30) - 1]
    assert stops_at([*almost, 99, *almost, 99]) is None
