"""Every encode case of the prompt format: text and ids (R61, R62, R63).

Three cases show other servers' rules, by their own notes; what ours are is tested instead.
"""

import json

import pytest
from tests.real_tokenizer import GOLDEN

from twinspark.errors import RequestError
from twinspark.text.fields import FEATURES
from twinspark.text.segments import encode_segments, marked
from twinspark.text.template import ChatPrompt, render_request
from twinspark.text.tokenizer import IMAGE, Tokenizer
from twinspark.text.tools import OPEN_CALLS

_DATA = json.loads(GOLDEN.read_text("utf-8"))
_ENCODE = _DATA["encode"]
# Another server's effort table; ours is design D3 and tested in test_thinking.py.
OTHER_TABLE = {"effort_minimal_is_low": "minimal", "effort_xhigh_is_75": "xhigh"}
OTHER_ROLE = "developer_role_hf"  # renders developer as a user; ours is a system message (R57)


def _checkpoint_request(case: dict) -> dict:
    kind = {"chat": "disabled", "thinking": "enabled"}[case["thinking_mode"]]
    return {"messages": case["messages"], "thinking": {"type": kind}, **case["args"]}


CASES = {case["name"]: (case["request"], case) for case in _ENCODE["cases"]} | {
    case["name"]: (_checkpoint_request(case), case)
    for case in _ENCODE["cases_checkpoint_encoder_only"]
}
OURS = [name for name in CASES if name not in OTHER_TABLE and name != OTHER_ROLE]


def render(request: dict) -> ChatPrompt:
    return render_request(request, serves=FEATURES)


def test_the_split_of_cases() -> None:
    assert len(CASES) == 56
    assert len(OURS) == 53


@pytest.mark.parametrize("name", OURS)
def test_prompt_text_and_ids(name: str, real_tokenizer: Tokenizer) -> None:
    request, case = CASES[name]
    prompt = render(request)
    assert prompt.text == case["prompt"]
    assert prompt.encode(real_tokenizer) == case["token_ids"]
    assert len(prompt.images) == case.get("num_images", 0) == case["prompt"].count(IMAGE)
    if case.get("plain_tokenize_equals_safe_tokenize"):
        assert real_tokenizer.encode_full(prompt.text) == case["token_ids"]


@pytest.mark.parametrize("name", OURS)
def test_same_prompt_with_other_ids(name: str, small_tokenizer: Tokenizer) -> None:
    """Nothing depends on the release's numbers; what the vocabulary lacks is said by name."""
    prompt = render(CASES[name][0])
    specials = [segment.text for segment in prompt.segments if segment.special]
    missing = {text for text in specials if text not in small_tokenizer.specials}
    if missing:
        with pytest.raises(RequestError, match="has no token") as caught:
            prompt.encode(small_tokenizer)
        assert any(text in str(caught.value) for text in missing)
        return
    ids = prompt.encode(small_tokenizer)
    assert small_tokenizer.decode(ids) == CASES[name][1]["prompt"]
    assert ids[0] == small_tokenizer.bos_id
    names = {token_id: text for text, token_id in small_tokenizer.specials.items()}
    assert [names[token_id] for token_id in ids if token_id in names] == specials


@pytest.mark.parametrize(
    ("name", "feature", "param"),
    [
        ("tools_no_system_think", "tools", "tools"),
        ("tool_history_without_tools_param", "tools", "messages[1].tool_calls"),
        ("response_format_json_schema", "response_format", "response_format"),
        ("task_title_think", "task", "messages[0].task"),
        ("image_between_text", "images", "messages[0].content[1].type"),
    ],
)
def test_what_a_caller_does_not_serve_is_refused_by_name(
    name: str, feature: str, param: str
) -> None:
    request = CASES[name][0]
    with pytest.raises(RequestError, match="not supported yet") as caught:
        render_request(request, serves=FEATURES - {feature})
    assert (caught.value.param, caught.value.code) == (param, "unsupported")
    assert render_request(request, serves={feature}).text == CASES[name][1]["prompt"]


@pytest.mark.parametrize(("name", "word"), OTHER_TABLE.items())
def test_the_other_effort_table_is_not_ours(name: str, word: str) -> None:
    request, case = CASES[name]
    assert request["reasoning_effort"] == word
    assert render(request).text != case["prompt"]


def test_developer_is_system() -> None:
    request, case = CASES[OTHER_ROLE]
    with pytest.raises(RequestError, match="not supported"):
        render(request)  # tools inside a message
    first, *rest = request["messages"]
    request = {**request, "messages": [{"role": "developer", "content": first["content"]}, *rest]}
    request["tools"] = first["tools"]
    as_system = {**request, "messages": [{**request["messages"][0], "role": "system"}, *rest]}
    assert render(request).segments == render(as_system).segments
    assert render(request).text != case["prompt"]


def test_ids_of_a_forced_opening(real_tokenizer: Tokenizer) -> None:
    """Prompt format 6 lists them."""
    assert OPEN_CALLS == _DATA["meta"]["strings"]["required_prefill"]
    opening = encode_segments(real_tokenizer, marked(OPEN_CALLS))
    assert opening == [271, 30, 128825, 10699, 1018]
