"""Who decides whether a reply thinks, and the table of efforts (design D3)."""

import pytest

from twinspark.errors import RequestError
from twinspark.text.thinking import Thinking, resolve_thinking

ON = {"type": "enabled"}
OFF = {"type": "disabled"}


@pytest.mark.parametrize(
    ("effort", "expected"),
    [("low", 50), ("medium", 75), ("high", 75), ("xhigh", 100), ("max", 100), ("ultra", 100)]
    + [(1, 1), (30, 30), (100, 100), (None, 75)],
)
def test_effort_table(effort: object, expected: int) -> None:
    for body in (
        {"reasoning_effort": effort},
        {"chat_template_kwargs": {"reasoning_effort": effort}},
    ):
        assert resolve_thinking(body) == Thinking(enabled=True, effort=expected)


@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_words_that_switch_off(effort: str) -> None:
    assert not resolve_thinking({"reasoning_effort": effort}).enabled
    assert not resolve_thinking({"chat_template_kwargs": {"reasoning_effort": effort}}).enabled


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (True, 75)),
        ({"thinking": None, "chat_template_kwargs": None, "reasoning_effort": None}, (True, 75)),
        ({"thinking": OFF}, (False, 75)),
        ({"thinking": OFF, "reasoning_effort": "max"}, (False, 100)),
        ({"thinking": ON, "reasoning_effort": "none"}, (True, 75)),
        ({"thinking": ON, "chat_template_kwargs": {"thinking": False}}, (True, 75)),
        ({"thinking": OFF, "chat_template_kwargs": {"thinking": True}}, (False, 75)),
        ({"chat_template_kwargs": {"thinking": False}}, (False, 75)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (False, 75)),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
         (True, 75)),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}, (True, 75)),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "max"},
         (True, 50)),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}, "reasoning_effort": "max"},
         (False, 75)),
        ({"chat_template_kwargs": {"reasoning_effort": 7}, "reasoning_effort": "none"}, (True, 7)),
    ],
)  # fmt: skip
def test_first_match_wins(body: dict, expected: tuple[bool, int]) -> None:
    found = resolve_thinking(body)
    assert (found.enabled, found.effort) == expected


def test_defaults_are_the_callers() -> None:
    default = Thinking(enabled=False, effort=30)
    assert resolve_thinking({}, default=default) == default
    assert resolve_thinking({"thinking": ON}, default=default) == Thinking(effort=30)
    assert resolve_thinking({"reasoning_effort": "low"}, default=default) == Thinking(effort=50)


BAD_EFFORTS = [0, 101, -1, True, False, "50", "", "High", "extreme", 50.0, [], {}, ["low"]]


@pytest.mark.parametrize("effort", BAD_EFFORTS)
def test_bad_efforts_are_named(effort: object) -> None:
    for extra in ({}, {"thinking": OFF}):
        with pytest.raises(RequestError, match="expected one of none, minimal, low") as caught:
            resolve_thinking({"reasoning_effort": effort, **extra})
        assert caught.value.param == "reasoning_effort"
    with pytest.raises(RequestError) as caught:
        resolve_thinking({"chat_template_kwargs": {"reasoning_effort": effort}})
    assert caught.value.param == "chat_template_kwargs.reasoning_effort"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"thinking": True}, "thinking"),
        ({"thinking": "enabled"}, "thinking"),
        ({"thinking": {}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"thinking": {"type": ["enabled"]}}, "thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}},
         "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
         "chat_template_kwargs.enable_thinking"),
    ],
)  # fmt: skip
def test_bad_switches_are_named(body: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve_thinking(body)
    assert caught.value.param == param
    assert len(str(caught.value)) < 200
