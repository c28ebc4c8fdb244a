"""What holds for every generated task: right ideals, the same cases again, texts read back."""

import itertools
import json
from collections import Counter

import pytest

from twinspark.config.paths import demo_pack_path
from twinspark.evals.tasks.count import Count
from twinspark.evals.tasks.effort import Effort
from twinspark.evals.tasks.examples import TRAINING_SEEDS, conversation, ideal_answer, turns
from twinspark.evals.tasks.json_schema import JsonSchema
from twinspark.evals.tasks.needle import Needle
from twinspark.evals.tasks.sums import Sums
from twinspark.evals.tasks.tools import Tools
from twinspark.text.reply import ReplyText
from twinspark.text.segments import encode_segments
from twinspark.text.thinking import resolve_thinking
from twinspark.text.tokenizer import EOS, Tokenizer

EVALUATED = (Sums(), Needle((512, 640)), Tools(), JsonSchema(), Effort(), Count())
WITH_THINKING = (
    Needle((512,), thinks=True),
    Tools(thinks=True),
    JsonSchema(thinks=True),
    Count(thinks=True),
)
TASKS = {task.name: task for task in EVALUATED} | {
    f"{task.name} thinks": task for task in WITH_THINKING
}
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
NUM_SEEDS = {"needle": 10}
"""Seeds of 100 cases each that are compared; fewer where a case takes its time."""

SMALL_SPACE = {"sums": 0.05, "count": 0.2}
"""Share of cases that training and evaluation may have in common, where there are few to draw."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(demo_pack_path() / "tokenizer.json")


def by_words(text: str) -> int:
    return len(text.split())


def told(case) -> str:
    """A case as text, its judges left out."""
    return json.dumps([case.label, case.max_tokens, conversation(case)], sort_keys=True)


def asked(case) -> str:
    return json.dumps([case.fields, *(step.add for step in case.steps)], sort_keys=True)


@every_task
@pytest.mark.parametrize("seed", [0, 7, 9999, TRAINING_SEEDS])
def test_ideals_are_right(task, seed):
    for case in task.cases(300, seed, by_words):
        for step in case.steps:
            assert step.judge(ideal_answer(step.ideal)), told(case)


@every_task
def test_the_same_cases_again_whatever_their_number(task):
    few = [told(case) for case in task.cases(5, 3, by_words)]
    assert few == [told(case) for case in itertools.islice(task.cases(50, 3, by_words), 5)]
    other = [told(case) for case in task.cases(5, 4, by_words)]
    assert not set(few) & set(other)


@every_task
def test_labels_come_in_turn(task):
    labels = [case.label for case in task.cases(120, 1, by_words)]
    kinds = len(set(labels))
    assert max(Counter(labels).values()) - min(Counter(labels).values()) <= 1
    assert all(len(set(labels[n : n + kinds])) == kinds for n in range(0, 60, kinds))


@every_task
def test_examples_are_read_back_from_their_tokens(task, tokenizer):
    for case in task.cases(60, TRAINING_SEEDS + 1, by_words):
        found = turns(case)
        assert len(found) == len(case.steps)
        for step, turn in zip(case.steps, found, strict=True):
            assert turn.reply[-1].text == EOS
            ids = encode_segments(tokenizer, turn.reply)
            assert len(ids) <= case.max_tokens
            reply = ReplyText(
                tokenizer, in_reasoning=turn.prompt.in_reasoning, calls=turn.prompt.calls
            )
            piece = reply.feed(ids)
            ideal = ideal_answer(step.ideal)
            assert reply.end in ("eos", "calls")
            assert (piece.content, piece.reasoning) == (ideal.content, ideal.reasoning)
            calls = [(call.name, json.loads(call.arguments)) for call in piece.calls]
            assert calls == [(call.name, json.loads(call.arguments)) for call in ideal.calls]


@every_task
def test_ideals_think_where_the_request_says_so(task):
    for case in task.cases(30, 6, by_words):
        thinks = resolve_thinking(case.fields).enabled
        for step in case.steps:
            assert ("reasoning_content" in step.ideal) == thinks
            assert bool(ideal_answer(step.ideal).reasoning) == thinks


@every_task
def test_the_last_turn_is_the_whole_text(task):
    for case in task.cases(20, 5, by_words):
        found = turns(case)
        for turn, later in itertools.pairwise(found):
            begin = (*turn.prompt.segments, *turn.reply)
            assert later.prompt.segments[: len(begin)] == begin


@pytest.mark.parametrize("task", EVALUATED, ids=lambda task: task.name)
def test_training_has_other_cases_than_evaluation(task):
    def drawn(first: int) -> list[str]:
        seeds = range(first, first + num_seeds)
        return [asked(case) for seed in seeds for case in task.cases(100, seed, by_words)]

    num_seeds = NUM_SEEDS.get(task.name, 50)
    training = set(drawn(TRAINING_SEEDS))
    shared = sum(case in training for case in drawn(0))
    assert shared <= SMALL_SPACE.get(task.name, 0) * 100 * num_seeds
