"""Where the demo's tasks say that each token of a reply comes from: exact, and nowhere else."""

import json
import re

import numpy as np
import pytest
from tools.demo import generated
from tools.demo.chats import example
from tools.demo.marks import Marks, said, spans, words_of

from twinspark.config.paths import demo_pack_path
from twinspark.evals.tasks.count import Count
from twinspark.evals.tasks.effort import Effort
from twinspark.evals.tasks.json_schema import JsonSchema
from twinspark.evals.tasks.sums import Sums
from twinspark.evals.tasks.tools import Tools
from twinspark.text.tokenizer import Tokenizer

SEED = generated.SEEDS["train"] + 99


@pytest.fixture(scope="module")
def model():
    return Tokenizer.from_file(demo_pack_path() / "tokenizer.json")


def marked(task, model, num):
    for case in task.cases(num, SEED, lambda text: len(model.encode_plain(text))):
        made = example(case, model)
        marks = Marks(made, model)
        generated.MARKS[task.name](marks, case)
        yield case, made, marks


def sources(made, model, begin, end):
    """Texts of the tokens that the characters from `begin` to `end` come from; None without."""
    starts = np.concatenate([[0], np.cumsum([len(model.token_text(i)) for i in made.ids.tolist()])])
    first = int(np.searchsorted(starts, begin, side="right")) - 1
    last = int(np.searchsorted(starts, end - 1, side="right"))
    return [
        model.token_text(int(made.ids[made.find[n]])) if made.find[n] >= 0 else None
        for n in range(first, last)
    ]


@pytest.mark.parametrize("task, _", generated.task_numbers())
def test_marks_stand_in_replies_and_point_back(model, task, _):
    count = 3 if task.name == "needle" else 16
    for _, made, _ in marked(task, model, count):
        at = np.flatnonzero(made.find >= 0)
        assert len(at) and made.loss[at].all()
        assert (made.find[at] < at).all()


def test_every_value_and_key_of_an_object_is_marked(model):
    for thinks in (False, True):
        for case, made, marks in marked(JsonSchema(thinks=thinks), model, 60):
            content = case.steps[0].ideal["content"]
            base = marks.text.rindex(content)
            for path, is_key, begin, end in spans(json.loads(content)):
                found = sources(made, model, base + begin, base + end)
                assert None not in found[:1], (content, path, is_key)
                if content[begin:end] not in ("true", "false"):
                    assert content[begin:end].strip().startswith(found[0].strip(' "')[:1])


def test_every_argument_of_a_call_is_marked(model):
    form = re.compile(r'parameter name="(\w+)" string="(true|false)">(.*?)</', re.S)
    calls = 0
    for _, made, marks in marked(Tools(), model, 60):
        for one in form.finditer(marks.text, *marks.replies[0]):
            calls += 1
            for group in (1, 2):
                assert None not in sources(made, model, *one.span(group))
            begin, end = one.span(3)
            if one[3].startswith("["):
                begin, end = begin + 2, begin + 4
            assert None not in sources(made, model, begin, end)
    assert calls > 60


def test_a_call_and_what_it_gave_come_from_their_places(model):
    for case, made, marks in marked(Tools(), model, 40):
        if len(case.steps) != 2:
            continue
        ideal = case.steps[1].ideal["content"]
        value = re.fullmatch(r"The .+ is (.+)\.", ideal)
        at = marks.text.rindex(ideal) + value.start(1)
        found = sources(made, model, at, at + len(value[1]))
        assert "".join(found).strip(' "').startswith(value[1][:1])


def test_flags_point_to_what_decides_them():
    text = "It is not fragile. Shared: yes. Set it. private set to no and the size 5."
    assert text[said(text, "fragile", False) - 6 :].startswith("fragile.")
    assert text[: said(text, "shared", True) + 1].endswith("Shared: yes")
    assert text[: said(text, "private", False) + 1].endswith("set to no")
    assert said(text, "urgent", True) is None
    assert text[said(text, "size", 5)] == "5"


def test_a_value_with_two_places_has_none():
    assert said("The size is 5. Size: 5.", "size", 5) is None
    assert said("The size is 5.5. The age is 5.", "size", 5) is None


@pytest.mark.parametrize("key", ["lamp_color", "lampColor"])
def test_keys_are_words(key):
    assert words_of(key) == "lamp color"


def test_spans_are_where_json_puts_them():
    value = {"a": [1, "x y"], "b": {"c": True, "d": -2.5}}
    text = json.dumps(value)
    found = {path: text[a:b] for path, is_key, a, b in spans(value) if not is_key}
    assert found == {("a", 0): "1", ("a", 1): "x y", ("b", "c"): "true", ("b", "d"): "-2.5"}
    assert [text[a:b] for _, is_key, a, b in spans(value) if is_key] == ["a", "b", "c", "d"]


def test_counting_ends_where_the_request_says(model):
    for case, made, _ in marked(Count(), model, 12):
        ask = case.steps[0].add[-1]["content"]
        end = re.findall(r"\d+", ask)[1]
        assert made.ids[-1] == model.eos_id
        source = int(made.find[-1])
        text = "".join(model.token_text(i) for i in made.ids[: source + 1].tolist())
        assert text.endswith(end)


def test_effort_decides_each_line_of_the_reasoning(model):
    for case, made, marks in marked(Effort(), model, 8):
        reasoning = case.steps[0].ideal["reasoning_content"]
        begin = marks.replies[0][0]
        for line in re.finditer("\n", reasoning):
            at = begin + line.end()
            (found,) = sources(made, model, at, at + 1)
            assert case.label.endswith(found)


def test_operands_come_from_the_question_and_totals_from_the_step_before(model):
    for task in (Effort(), Sums()):
        for case, made, marks in marked(task, model, 12):
            content = case.steps[0].ideal["content"]
            at = marks.text.rindex(content)
            thinks = "reasoning_content" in case.steps[0].ideal
            for number in list(re.finditer(r"\d+", content))[: None if thinks else -1]:
                begin, end = number.span()
                found = sources(made, model, at + begin, at + end)
                assert "".join(t or "?" for t in found) == number[0]
            if task.name == "effort":
                totals = re.finditer(r"(\d+) \+ (\d+) = (\d+)\.", marks.text)
                for total in totals:
                    begins_line = marks.text[total.start() - 1] == "\n"  # the effort decides that
                    for group in (1, 2)[begins_line:]:
                        found = sources(made, model, *total.span(group))
                        assert found[0] == total[group][0]
