"""Every encode case of the prompt format for plain chat and thinking: text and ids.

Cases are left out by the feature they use, never by name; a feature that is left out must be
refused by name instead.
"""

import json

import pytest
from tests.real_tokenizer import GOLDEN

from twinspark.errors import RequestError
from twinspark.text.template import ChatPrompt, render_request
from twinspark.text.tokenizer import Tokenizer

_ENCODE = json.loads(GOLDEN.read_text("utf-8"))["encode"]
# How many cases wait for which feature; one of those with tools has a developer message, whose
# role without tools is tested in test_template.py.
EXPECTED_LATER = {"tools": 12, "tool_calls": 2, "task": 4, "response_format": 3, "image_url": 2}
# Another server's effort table; ours is design D3 and tested in test_thinking.py.
OTHER_TABLE = {"effort_minimal_is_low": "minimal", "effort_xhigh_is_75": "xhigh"}


def _checkpoint_request(case: dict) -> dict:
    kind = {"chat": "disabled", "thinking": "enabled"}[case["thinking_mode"]]
    return {"messages": case["messages"], "thinking": {"type": kind}, **case["args"]}


CASES = {case["name"]: (case["request"], case) for case in _ENCODE["cases"]} | {
    case["name"]: (_checkpoint_request(case), case)
    for case in _ENCODE["cases_checkpoint_encoder_only"]
}


def _later_feature(request: dict) -> str | None:
    """What a case needs that this version does not render."""
    messages = request["messages"]
    if request.get("tools") and request.get("tool_choice") != "none":
        return "tools"
    for message in messages:
        for field in ("tools", "tool_calls", "task"):
            if message.get(field):
                return field
        if message["role"] == "tool":
            return "role"
        parts = message["content"] if isinstance(message["content"], list) else []
        if any(part["type"] == "image_url" for part in parts):
            return "image_url"
    if request.get("response_format", {"type": "text"})["type"] != "text":
        return "response_format"
    return None


LATER = {name: feature for name, (body, _) in CASES.items() if (feature := _later_feature(body))}
NOW = [name for name in CASES if name not in LATER and name not in OTHER_TABLE]


def test_the_split_of_cases() -> None:
    by_feature = {feature: sum(f == feature for f in LATER.values()) for feature in LATER.values()}
    assert len(CASES) == 56
    assert by_feature == EXPECTED_LATER
    assert len(NOW) == 56 - len(OTHER_TABLE) - sum(EXPECTED_LATER.values())


@pytest.mark.parametrize("name", NOW)
def test_prompt_text_and_ids(name: str, real_tokenizer: Tokenizer) -> None:
    request, case = CASES[name]
    prompt = render_request(request)
    assert prompt.text == case["prompt"]
    assert prompt.encode(real_tokenizer) == case["token_ids"]
    if case.get("plain_tokenize_equals_safe_tokenize"):
        assert real_tokenizer.encode_full(prompt.text) == case["token_ids"]


@pytest.mark.parametrize("name", NOW)
def test_same_prompt_with_other_ids(name: str, small_tokenizer: Tokenizer) -> None:
    prompt: ChatPrompt = render_request(CASES[name][0])
    ids = prompt.encode(small_tokenizer)
    assert small_tokenizer.decode(ids) == CASES[name][1]["prompt"]
    assert ids[0] == small_tokenizer.bos_id
    specials = [segment.text for segment in prompt.segments if segment.special]
    names = {token_id: text for text, token_id in small_tokenizer.specials.items()}
    assert [names[token_id] for token_id in ids if token_id in names] == specials


@pytest.mark.parametrize("name", LATER)
def test_later_features_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"{LATER[name]}.*not supported yet") as caught:
        render_request(CASES[name][0])
    assert caught.value.param is not None
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(("name", "word"), OTHER_TABLE.items())
def test_the_other_effort_table_is_not_ours(name: str, word: str) -> None:
    request, case = CASES[name]
    assert request["reasoning_effort"] == word
    assert render_request(request).text != case["prompt"]
