"""Tool calls and results of earlier turns, tasks, and images (R22, R57, R62)."""

import pytest

from twinspark.errors import RequestError
from twinspark.text.fields import FEATURES
from twinspark.text.template import ChatPrompt, render_request
from twinspark.text.tokenizer import DSML

USER = {"role": "user", "content": "q"}
NOW = {"type": "function", "function": {"name": "now"}}


def render(*messages: dict, **fields: object) -> ChatPrompt:
    body = {"messages": list(messages), "thinking": {"type": "disabled"}, **fields}
    return render_request(body, serves=FEATURES)


def calling(*calls: dict, **fields: object) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def call(arguments: object = "{}", call_id: str = "1", name: str = "f") -> dict:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(call_id: str, content: object = "r") -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def inside_of_call(arguments: object) -> str:
    text = render(USER, calling(call(arguments)), result("1")).text
    start = f'<{DSML} invoke name="f">\n'
    return text[text.index(start) + len(start) : text.index(f"\n</{DSML} invoke>")]


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<{DSML} parameter name="{name}" string="{string}">{value}</{DSML} parameter>'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{", "{"),
        ("", ""),
        ("[1]", "[1]"),
        ("3", "3"),
        ('"{}"', '"{}"'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
        ("[" * 100_000, "[" * 100_000),
        ([1, "x"], '[1, "x"]'),
        (3, "3"),
        (False, "false"),
    ],
)
def test_broken_arguments_are_text(arguments: object, text: str) -> None:
    assert inside_of_call(arguments) == parameter("arguments", text)


@pytest.mark.parametrize("nothing", [None, "{}", {}, " {}\n"])
def test_no_arguments(nothing: object) -> None:
    assert inside_of_call(nothing) == ""


def test_arguments_by_type() -> None:
    as_object = {"s": "a\n<x>", "n": 1.0, "i": -2, "b": False, "z": None, "o": {"k": ["\u00e9"]}}
    expected = "\n".join(
        [
            parameter("s", "a\n<x>"),
            parameter("n", "1.0", "false"),
            parameter("i", "-2", "false"),
            parameter("b", "false", "false"),
            parameter("z", "null", "false"),
            parameter("o", '{"k": ["\u00e9"]}', "false"),
        ]
    )
    assert inside_of_call(as_object) == expected


def turn_of(*results: dict) -> str:
    calls = calling(call(call_id="a"), call(call_id="b"), call(call_id="b"), call(call_id="c"))
    text = render(USER, calls, *results).text
    return text[text.rindex("<\uff5cUser\uff5c>") + 8 : text.rindex("<\uff5cAssistant\uff5c>")]


def test_results_go_by_their_calls_and_texts_stay() -> None:
    results = [result("c", "3"), USER, result("a", "1"), result("b", "2")]
    tags = [f"<tool_result>{n}</tool_result>" for n in (1, 2, 3)]
    assert turn_of(*results) == "\n\n".join([tags[0], "q", tags[1], tags[2]])
    # One that nobody asked for counts as the first; equal ones keep their order.
    assert turn_of(result("b", "2"), result("?", "1"), result("a", "3")) == "\n\n".join(
        [tags[0], tags[2], tags[1]]
    )
    assert turn_of(result("?", "1")) == tags[0]


def test_results_belong_to_the_newest_calls() -> None:
    old = calling(call(call_id="x"), call(call_id="y"))
    new = calling(call(call_id="y"), call(call_id="x"))
    between = {"role": "assistant", "content": "so"}
    text = render(
        USER, old, result("x"), new, result("x", "2"), result("y", "1"), between, USER
    ).text
    assert "<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>" in text


def test_history_keeps_its_reasoning_with_tools_only() -> None:
    messages = (USER, calling(call(), reasoning="why"), result("1"), calling(call()), result("1"))
    thinking = {"thinking": {"type": "enabled"}}
    with_tools = render(*messages, tools=[NOW], **thinking).text
    assert with_tools.count("<think>why</think>\n\n") == 1
    assert with_tools.count("<think></think>\n\n") == 1  # lacking reasoning is no error
    for fields in ({}, {"tools": [NOW], "tool_choice": "none"}):
        assert "why" not in render(*messages, **thinking, **fields).text


@pytest.mark.parametrize("late", ["system", "developer"])
def test_late_system_messages_stay_in_place(late: str) -> None:
    rules = [{"role": late, "content": text} for text in ("A", "B", "C")]
    text = render(rules[0], USER, rules[1], USER, rules[2], tools=[NOW]).text
    after = text[text.index("calls.\n<\uff5c") + 7 :].replace("\uff5c", "|")
    assert text.startswith(
        "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cSystem\uff5c>A\n\n## Tools"
    )
    assert after == "<|User|>q<|System|>B<|User|>q<|System|>C<|Assistant|></think>"


@pytest.mark.parametrize(
    ("messages", "param", "match"),
    [
        ([result("1")], "messages[0]", "no assistant message"),
        ([USER, {"role": "assistant", "content": "x"}, result("1")], "messages[2]", "tool_calls"),
        (
            [USER, calling(call()), {"role": "tool", "content": "x"}],
            "messages[2].tool_call_id",
            "string",
        ),
        ([USER, calling(call()), {**result("1"), "content": 3}], "messages[2].content", "string"),
        ([{**USER, "tool_calls": [call()]}], "messages[0].tool_calls", "only an assistant"),
        ([USER, {"role": "assistant", "tool_calls": {"a": 1}}], "messages[1].tool_calls", "list"),
        ([USER, calling("f")], "messages[1].tool_calls[0]", "object"),
        ([USER, calling({"type": "custom"})], "messages[1].tool_calls[0].type", "'custom'"),
        ([USER, calling({"id": "1"})], "messages[1].tool_calls[0].function", "object"),
        (
            [USER, calling({"function": {"arguments": "{}"}})],
            "messages[1].tool_calls[0].function.name",
            "string",
        ),
        (
            [USER, calling({**call(), "id": 1})],
            "messages[1].tool_calls[0].id",
            "string",
        ),
        (
            [USER, calling(call("\ud800"))],
            "messages[1].tool_calls[0].function.arguments",
            "surrogate",
        ),
        ([USER, calling(call(), prefix=True)], "messages[1].prefix", "no tool_calls"),
        ([{**USER, "task": "sing"}], "messages[0].task", "'sing', expected one of action, query"),
        ([{**USER, "task": "query"}, USER], "messages[0].task", "last message of its turn"),
        ([{"role": "system", "content": "", "task": "query"}], "messages[0].task", "only a user"),
    ],
)
def test_what_is_wrong_is_named(messages: list[dict], param: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        render(*messages)
    assert caught.value.param == param
    assert str(caught.value).isprintable()


def test_a_task_of_the_request_is_the_last_message_s() -> None:
    assert render(USER, task="domain") == render({**USER, "task": "domain"})
    for messages in ([{"role": "system", "content": "s"}], [{**USER, "task": "query"}]):
        with pytest.raises(RequestError, match="last message of the user") as caught:
            render(*messages, task="domain")
        assert caught.value.param == "task"


def test_tasks_in_the_history_are_answered_without_a_header() -> None:
    messages = ({**USER, "task": "title"}, {"role": "assistant", "content": "T"}, USER)
    text = render(*messages, thinking={"type": "enabled"}).text.replace("\uff5c", "|")
    assert "<|User|>q<|title|>T<|end" in text
    assert text.endswith("<|User|>q<|Assistant|><think>")
    assert render({**USER, "task": "action"}, thinking={"type": "enabled"}).in_reasoning
    assert not render({**USER, "task": "title"}, thinking={"type": "enabled"}).in_reasoning


def image(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_are_in_the_order_of_their_placeholders() -> None:
    calls = calling(call(call_id="a"), call(call_id="b"))
    first = [image("1"), {"type": "text", "text": "x"}, image("2")]
    prompt = render(
        {**USER, "content": first}, calls, result("b", [image("4")]), result("a", [image("3")])
    )
    assert [part.url for part in prompt.images] == ["1", "2", "3", "4"]
    assert prompt.images[3].where == "messages[2].content[0]"
    assert prompt.text.count("<\uff5cdeepseek_image\uff5c>") == 4
    placeholder = "<\uff5cdeepseek_image\uff5c>"
    typed = render({**USER, "content": [{"type": "text", "text": placeholder}, image("1")]})
    assert [s.text for s in typed.segments if s.special].count(placeholder) == 1
    assert f"{placeholder}\n\n{placeholder}" in typed.text


def test_images_need_a_place_to_come_from() -> None:
    for part, param in (
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
    ):
        with pytest.raises(RequestError) as caught:
            render({**USER, "content": [part]})
        assert caught.value.param == param
