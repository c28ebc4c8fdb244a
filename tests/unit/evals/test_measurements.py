"""Text and drafts: measurements whose scores are no share of right answers."""

import math
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
from tests.scripted_subject import ScriptedSubject, right

from twinspark.errors import RequestError
from twinspark.evals.case import NOT_MEASURABLE, Answer, Message
from twinspark.evals.evaluation import Item, Result
from twinspark.evals.tasks.drafts import Drafts
from twinspark.evals.tasks.text import PASSAGE_CHARS, TextPerplexity, passages


def texts_of(items: Sequence[Item]) -> list[str]:
    found: list[str] = []

    def keep(text: str) -> list[float]:
        found.append(text)
        return [-1.0]

    subject = ScriptedSubject(right, scores=keep)
    for item in items:
        item.measure(subject)
    return found


def test_passages_begin_at_paragraphs_are_long_enough_and_repeat_only_after_all() -> None:
    text = "\n\n".join(f"{n} " + "word " * 80 for n in range(20))
    found = list(islice(passages(text, random.Random(1)), 40))
    places = len(set(found))
    assert 10 < places < 20
    assert len(set(found[:places])) == places
    for passage in found:
        assert len(passage) >= PASSAGE_CHARS
        assert text.find(passage) == 0 or text[text.find(passage) - 2 :].startswith("\n\n")


def test_text_has_code_and_prose_in_turn_and_the_same_for_a_seed() -> None:
    task = TextPerplexity()
    items = list(task.items(8, 3, len))
    assert [item.label for item in items] == ["code", "prose"] * 4
    texts = texts_of(items)
    assert texts == texts_of(list(task.items(8, 3, len)))
    assert texts[:4] == texts_of(list(task.items(4, 3, len)))
    assert texts != texts_of(list(task.items(8, 4, len)))
    assert any("def " in text for text in texts[::2])
    assert not any("def " in text for text in texts[1::2])


def test_a_uniform_model_has_the_perplexity_of_its_choices() -> None:
    task = TextPerplexity()
    subject = ScriptedSubject(right, scores=lambda text: [-math.log(8)] * len(text.encode()))
    results = [item.measure(subject) for item in task.items(4, 0, len)]
    assert task.score(results) == pytest.approx(1 / 8)
    figures = task.figures(results)
    assert figures["perplexity"] == pytest.approx(8)
    assert figures["bits a byte"] == pytest.approx(3)  # one token a byte
    assert figures["tokens"] == sum(result.tokens for result in results) > 4 * PASSAGE_CHARS


def test_perplexity_weighs_tokens_not_passages() -> None:
    results = [
        Result(label="code", score=1.0, tokens=30, sums={"nats": 0.0, "bytes": 60}),
        Result(label="code", score=0.0, tokens=10, sums={"nats": 40.0, "bytes": 20}),
        Result(label="code", score=0.0, cause="it was too long"),
    ]
    assert TextPerplexity().score(results) == pytest.approx(math.exp(-1))
    assert TextPerplexity().figures(results)["bits a byte"] == pytest.approx(0.5 / math.log(2))


def test_drafts_asks_for_three_kinds_of_text_without_thinking() -> None:
    asked: list[Mapping[str, Any]] = []

    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        asked.append(fields)
        return Answer(completion_tokens=12, rounds=3)

    task = Drafts()
    subject = ScriptedSubject(reply)
    results = [item.measure(subject) for item in task.items(6, 0, len)]
    assert [r.label for r in results] == ["code", "prose", "structured"] * 2
    assert all(fields["chat_template_kwargs"]["thinking"] is False for fields in asked)
    forms = [fields.get("response_format", {}).get("type") for fields in asked]
    assert forms == [None, None, "json_schema"] * 2
    assert task.score(results) == pytest.approx(0.75)
    assert task.figures(results) == {"tokens a round": 4.0, "tokens": 72}


def test_drafts_of_a_seed_are_the_same_requests_and_others_of_another() -> None:
    def requests(seed: int) -> list[list[Message]]:
        subject = ScriptedSubject(lambda m, f: Answer(completion_tokens=1, rounds=1))
        for item in Drafts().items(12, seed, len):
            item.measure(subject)
        return subject.asked

    assert requests(5) == requests(5) != requests(6)


def test_drafts_cannot_be_measured_where_rounds_are_not_said() -> None:
    subject = ScriptedSubject(lambda messages, fields: Answer(content="x", completion_tokens=9))
    item = next(Drafts().items(1, 0, len))
    with pytest.raises(RequestError) as caught:
        item.measure(subject)
    assert caught.value.code == NOT_MEASURABLE


def test_a_text_of_impossible_tokens_has_an_infinite_perplexity() -> None:
    subject = ScriptedSubject(right, scores=lambda text: [-9999.0] * 3)
    item = next(TextPerplexity().items(1, 0, len))
    result = item.measure(subject)
    assert result.score == 0.0
    assert TextPerplexity().figures([result])["perplexity"] == float("inf")
