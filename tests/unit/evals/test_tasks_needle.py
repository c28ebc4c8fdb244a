"""Needles: lengths, where the values stand, and which answers are right."""

import random

import pytest

from twinspark.config.paths import demo_pack_path
from twinspark.errors import RequestError
from twinspark.evals.case import NOT_MEASURABLE, Answer
from twinspark.evals.tasks import needle
from twinspark.evals.tasks.draw import case_random
from twinspark.evals.tasks.filler import fitted
from twinspark.evals.tasks.needle import LENGTHS, Fact, Needle, hide, is_right, longest_prompt
from twinspark.text.template import render_request
from twinspark.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(demo_pack_path() / "tokenizer.json")


def by_words(text: str) -> int:
    return len(text.split())


def by_characters(text: str) -> int:
    return len(text) // 4 + 1  # as an estimate for a server that cannot count


def fact(place: str, value: str, kind: str = "access code") -> Fact:
    return Fact(
        kind=kind, place=place, value=value, statement=f"The {kind} of the {place} is {value}."
    )


@pytest.mark.parametrize("kind", ["demo", "words", "characters"])
def test_prompts_have_their_length(tokenizer, kind):
    counts = {
        "demo": lambda text: len(tokenizer.encode_plain(text)),
        "words": by_words,
        "characters": by_characters,
    }
    count = counts[kind]
    for case in Needle().cases(16, 2, count):
        (message,) = case.steps[0].add
        length = int(case.label)
        assert 0.98 * length <= count(message["content"]) <= length
    assert [case.label for case in Needle().cases(8, 2, count)] == [*map(str, LENGTHS)] * 2


def test_the_whole_request_fits_a_context_of_its_length(tokenizer):
    def count(text: str) -> int:
        return len(tokenizer.encode_plain(text))

    for case in Needle((512, 32768)).cases(6, 8, count):
        request = {"messages": [*case.steps[0].add], **case.fields}
        prompt = len(render_request(request).encode(tokenizer))
        assert prompt <= longest_prompt(int(case.label))
        assert int(case.label) < 32768 or prompt + case.max_tokens <= 32768
        assert count(case.steps[0].ideal["content"]) < case.max_tokens
    for case in Needle((32768,), thinks=True).cases(2, 8, count):
        request = {"messages": [*case.steps[0].add], **case.fields}
        assert len(render_request(request).encode(tokenizer)) <= longest_prompt(32768)


def test_few_counts_make_a_long_text():
    num_counts = 0

    def count(text: str) -> int:
        nonlocal num_counts
        num_counts += 1
        return by_words(text)

    list(Needle((32768,)).cases(5, 3, count))
    assert num_counts < 5 * 40  # a server counts over the network


def test_values_stand_where_they_are_said_to(tokenizer):
    task = Needle((1024,))
    depths = []
    for index in range(60):
        stack = task.haystack(index, 4, by_words)
        for asked, (start, end) in zip(stack.asked, stack.values, strict=True):
            assert stack.prompt[start:end] == asked.value
            assert stack.prompt[:end].endswith(asked.statement.removesuffix("."))
            depths.append(start / len(stack.prompt))
        for other in stack.others:
            assert stack.prompt.count(other.statement) == 1
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_facts_are_hidden_in_any_text():
    lines = [f"x{n} = {n}\n" for n in range(50)]
    facts = (fact("blue harbor", "48213"), fact("old mill", "7777"), fact("red gate", "red-fox"))
    hidden = hide(lines, facts, random.Random(5), before="# ", after="\n")
    assert [hidden.text[start:end] for start, end in hidden.values] == ["48213", "7777", "red-fox"]
    rest = [line for line in hidden.text.splitlines(keepends=True) if not line.startswith("#")]
    assert rest == lines
    same = hide(["x"], facts, random.Random(5))
    assert [same.text[start:end] for start, end in same.values] == ["48213", "7777", "red-fox"]


def test_drawn_facts_do_not_collide():
    for n in range(300):
        r = case_random("facts", 0, n)
        asked = needle.draw_facts(r, 2)
        facts = (*asked, *needle.draw_facts(r, 6, like=asked))
        assert len({(one.kind, one.place) for one in facts}) == 8
        assert not any(a.value in b.value for a in facts for b in facts if a is not b)


ONE = (fact("blue harbor", "48213"),)
TWO = (fact("blue harbor", "48213"), fact("old mill", "velvet-otter", "password"))
OTHER = (fact("red harbor", "99120"),)


@pytest.mark.parametrize(("content", "asked"), [
    ("48213", ONE), ("The access code is **48,213**.", ONE), ("It's `48213`!", ONE),
    ("48213 and velvet-otter", TWO), ("1. 48213\n2. Velvet-Otter", TWO),
    ("The blue harbor has 48213, the old mill velvet-otter.", TWO),
    ("old mill: velvet-otter, blue harbor: 48213", TWO),
    ("48213 is that of the blue harbor, velvet-otter that of the old mill", TWO),
    ("_48213_", ONE), ("__48213__", ONE), ("*48213*", ONE), ("- 48213", ONE), ("(48213)", ONE),
    ("access code:48213", ONE), ("It is 48213, as the text says.", ONE), ("$48213$", ONE),
    ("The code is not far: 48213", ONE),
    ("The password is velvet-otter, the access code 48213", TWO),
    ("The access code and the password are 48213 and velvet-otter.", TWO),
    ("Blue harbor and old mill? Old mill: velvet-otter. Blue harbor: 48213.", TWO),
    ("The password of the old mill is velvet-otter, the access code of the harbor 48213", TWO),
])  # fmt: skip
def test_right_answers(content, asked):
    assert is_right(content, asked, OTHER)


@pytest.mark.parametrize(("content", "asked"), [
    ("", ONE), ("48214", ONE), ("482130", ONE), ("148213", ONE), ("4821", ONE), ("99120", ONE),
    ("48213 or 99120", ONE), ("48213", TWO), ("velvet-otter", TWO),
    ("velvet-otter and 48213", TWO), ("blue harbor: velvet-otter, old mill: 48213", TWO),
    ("old mill: 48213, blue harbor: velvet-otter", TWO),
    ("-48213", ONE), ("\u221248213", ONE), ("48213.5", ONE), ("48213-1", ONE), ("1-48213", ONE),
    ("It is not 48213", ONE), ("It isn't **48213**", ONE), ("not the 48213", ONE), ("48 213", ONE),
    ("48213%", ONE), ("1/48213", ONE), ("48213/2", ONE), ("1.48213", ONE), ("48213:7", ONE),
    ("48213, not 48213", ONE), ("48213 and not velvet-otter", TWO), ("48213 -99120", ONE),
    ("48213 _99120_", ONE), ("The password is 48213, the access code velvet-otter", TWO),
    ("The password of the blue harbor: 48213, the access code of the old mill: velvet-otter", TWO),
    ("Blue harbor and old mill? Old mill: 48213. Blue harbor: velvet-otter.", TWO),
    ("blue harbor: velvet-otter, old mill: 48213. So 48213 and velvet-otter.", TWO),
])  # fmt: skip
def test_wrong_answers(content, asked):
    assert not is_right(content, asked, OTHER)


def test_kinds_tell_facts_of_one_place_apart():
    both = (fact("old mill", "48213"), fact("old mill", "velvet-otter", "password"))
    assert is_right("password: velvet-otter, access code: 48213", both, OTHER)
    assert is_right("The old mill has 48213 and velvet-otter.", both, OTHER)
    assert not is_right("password: 48213, access code: velvet-otter", both, OTHER)


def test_either_order_of_the_ideals_is_right():
    task = Needle((512,))
    num_pairs = 0
    for index, case in enumerate(task.cases(300, 7, by_words)):
        stack = task.haystack(index, 7, by_words)
        if len(stack.asked) > 1:
            num_pairs += 1
            turned = needle.reply(stack.asked[::-1])
            assert case.steps[0].judge(Answer(content=turned)), turned
    assert num_pairs > 30


def test_changed_ideals_are_wrong():
    task = Needle((512,))
    for index, case in enumerate(task.cases(300, 6, by_words)):
        stack = task.haystack(index, 6, by_words)
        (step,) = case.steps
        content = step.ideal["content"]
        value = stack.asked[0].value
        for other in stack.others:
            assert not step.judge(Answer(content=content.replace(value, other.value)))
        assert not step.judge(Answer(content=content.replace(value, value + "7")))
        assert not step.judge(Answer(content=content, finish="length"))
        assert not step.judge(Answer(content=stack.prompt))
        assert not step.judge(Answer(content=stack.prompt.rpartition("\n\n")[0]))
        for wrong in (f"-{value}", f"{value}-1", f"{value}.5", f"not {value}"):
            assert not step.judge(Answer(content=content.replace(value, wrong)))
        if len(stack.asked) > 1:
            second = stack.asked[1].value
            swapped = content.replace(value, "#").replace(second, value).replace("#", second)
            assert not step.judge(Answer(content=swapped))


@pytest.mark.parametrize("lengths", [(), (100,), (1024, 1024)])
def test_lengths_are_checked(lengths):
    with pytest.raises(ValueError, match="expected different numbers of at least 512"):
        Needle(lengths)


def test_a_length_that_cannot_hold_its_facts_is_refused():
    with pytest.raises(RequestError, match="no text"):
        list(Needle((512,)).cases(3, 0, lambda text: len(text) * 3))


@pytest.mark.parametrize("count", [7, -3, 0, 100_000])
def test_counts_that_do_not_grow_with_the_text_are_refused(count: int) -> None:
    with pytest.raises(RequestError, match="no text") as caught:
        fitted(random.Random(0), 4096, 16, lambda text: count)
    assert caught.value.code == NOT_MEASURABLE
