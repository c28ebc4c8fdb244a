import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
from tests.scripted_subject import ScriptedSubject

from twinspark.errors import ConfigError, RequestError
from twinspark.evals.case import Answer
from twinspark.evals.catalog import (
    ENTRIES,
    MAX_LENGTH,
    MAX_SEED,
    Entry,
    Options,
    context_of,
    find,
    fitting_lengths,
    parse_lengths,
    room,
)
from twinspark.evals.tasks.examples import TRAINING_SEEDS
from twinspark.evals.tasks.needle import Needle, longest_prompt

LONG = dataclasses.replace(ENTRIES[0], lengths=(64, 256), shortest=16)


def by_words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_makes_the_same_items_for_a_seed(entry: Entry) -> None:
    options = Options(lengths=entry.lengths[:1])

    def asked(seed: int) -> tuple[list[str], list[object]]:
        texts: list[object] = []
        subject = ScriptedSubject(
            lambda messages, fields: Answer(completion_tokens=1, rounds=1),
            scores=lambda text: [-float(len(texts) or texts.append(text) or 1)],
        )
        evaluation = entry.make(options)
        assert (evaluation.name, evaluation.summary) == (entry.name, entry.summary)
        items = list(evaluation.items(6, seed, by_words))
        for item in items:
            item.measure(subject)
        return [item.label for item in items], texts + subject.asked

    labels, requests = asked(1)
    assert len(labels) == 6
    assert asked(1) == (labels, requests)
    assert asked(2)[0] == labels and asked(2)[1] != requests


def test_names_differ_and_unknown_ones_list_the_known() -> None:
    names = sorted(entry.name for entry in ENTRIES)
    assert all(a != b for a, b in pairwise(names))
    assert find("text").name == "text"
    with pytest.raises(ConfigError) as caught:
        find("texts")
    assert all(name in str(caught.value) for name in [*names, "'texts'", "and all"])


def test_lengths() -> None:
    assert parse_lengths(None, LONG) == (64, 256)
    assert parse_lengths("4096, 512,4096", LONG) == (512, 4096)


@pytest.mark.parametrize("text", ["", "1k", "12.5", "64,,128", "8", "-64", str(MAX_LENGTH + 1)])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths is"):
        parse_lengths(text, LONG)


def test_lengths_over_the_context_are_left_out_and_named() -> None:
    assert fitting_lengths((64, 256), 10, None) == ((64, 256), ())
    assert fitting_lengths((64, 256), 10, 296) == ((64, 256), ())
    fits, skipped = fitting_lengths((64, 256), 10, 295)
    assert fits == (64,)
    assert skipped == (
        "length 256: a prompt of up to 286 tokens, and 10 for the reply, are more than the context "
        "of 295 tokens",
    )
    with pytest.raises(RequestError, match="none of the lengths 64, 256"):
        fitting_lengths((64, 256), 10, 40)


def test_a_length_over_the_context_is_left_out_though_its_prompts_would_fit() -> None:
    assert longest_prompt(32772) + room(thinks=False) <= 32768
    fits, skipped = fitting_lengths((1024, 32772), room(thinks=False), 32768)
    assert fits == (1024,)
    assert skipped == ("length 32772: it is longer than the context of 32768 tokens",)


@pytest.mark.parametrize(("thinks", "shortest"), [(False, 25_401), (True, 230_201)])
def test_from_which_length_on_a_context_holds_its_own(thinks: bool, shortest: int) -> None:
    """The guide names these two: half a percent is the template and the reply's max_tokens."""
    guide = Path(__file__).parents[3] / "docs/guides/evaluate.md"
    assert f"{shortest:,}" in guide.read_text()
    reply = room(thinks=thinks)
    for length in (shortest, 262_144, 1 << 20):
        assert fitting_lengths((length,), reply, length) == ((length,), ())
    for length in (512, 6400, shortest - 1):
        with pytest.raises(RequestError, match=f"none of the lengths {length} fits"):
            fitting_lengths((length,), reply, length)


def test_an_estimate_of_tokens_may_be_as_long_as_the_length() -> None:
    for thinks, length in ((False, 1 << 20), (True, 1 << 20)):
        reply = room(thinks=thinks)
        with pytest.raises(RequestError, match=f"none of the lengths {length} fits"):
            fitting_lengths((length,), reply, length, is_exact=False)
        context = context_of(length, thinks=thinks)
        assert fitting_lengths((length,), reply, context, is_exact=False) == ((length,), ())
        assert fitting_lengths((length,), reply, context) == ((length,), ())


@pytest.mark.parametrize("thinks", [False, True])
def test_the_room_is_the_longest_reply_of_needle(thinks: bool) -> None:
    cases = Needle((512,), thinks=thinks).cases(4, 0, by_words)
    assert {case.max_tokens for case in cases} == {room(thinks=thinks)}


def test_no_seed_is_one_of_training() -> None:
    assert MAX_SEED == TRAINING_SEEDS - 1
