"""Prompts without messages, and replies in fences."""

import pytest

from twinspark.errors import RequestError
from twinspark.text.completion import encode_completion, render_gap
from twinspark.text.formats import unfenced
from twinspark.text.tokenizer import BOS, EOS, FIM_BEGIN, FIM_END, FIM_HOLE, USER, Tokenizer


def test_the_begin_token_stands_once_in_front(small_tokenizer: Tokenizer) -> None:
    plain = small_tokenizer.encode_plain("def f")
    expected = [small_tokenizer.bos_id, *plain]
    assert encode_completion(small_tokenizer, "def f") == expected
    assert encode_completion(small_tokenizer, BOS + "def f") == expected
    assert encode_completion(small_tokenizer, "") == [small_tokenizer.bos_id]
    assert encode_completion(small_tokenizer, USER)[1:] == [small_tokenizer.user_id]
    with pytest.raises(RequestError, match="surrogate") as caught:
        encode_completion(small_tokenizer, "\ud800")
    assert caught.value.param == "prompt"


def test_a_gap(real_tokenizer: Tokenizer) -> None:
    prompt = render_gap("def f(", f"): {FIM_HOLE}{EOS}")
    ids = prompt.encode(real_tokenizer)
    specials = [0, 128801, 128800, 128802]
    assert [
        token_id for token_id in ids if token_id in real_tokenizer.specials.values()
    ] == specials
    assert prompt.text == f"{BOS}{FIM_BEGIN}def f({FIM_HOLE}): {FIM_HOLE}{EOS}{FIM_END}"
    assert prompt.continues and not prompt.in_reasoning
    with pytest.raises(RequestError) as caught:
        render_gap("", "\udfff")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('```json\n{"a": 1}\n```', '{"a": 1}'),
        ("\n```\n[1]\n```  \n", "[1]"),
        ("```json\n{}", "```json\n{}"),
        ("```python\nx\n```", "```python\nx\n```"),
        ("so: ```json\n{}\n```", "so: ```json\n{}\n```"),
        ("```\na\n```\n```\nb\n```", "```\na\n```\n```\nb\n```"),
        ("{}", "{}"),
        ("```", "```"),
        ("```\n```", ""),
    ],
)
def test_fences(content: str, expected: str) -> None:
    assert unfenced(content) == expected
