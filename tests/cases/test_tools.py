"""Tool markup, call deltas, argument types, tool choice: R1 to R9, R22, R50, R63, R77."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tests.cases.api import CHAT, OPEN, Api, block, call, question, tool, value, without_ids
from tests.live_server import LiveServer
from tests.scripted_engine import ScriptedEngine

from twinspark.text.tokenizer import DSML

TOOLS = [tool("f", {"x": {"type": "string"}}), tool("add", {"a": {"type": "integer"}})]
PLAIN = {"tools": TOOLS, "reasoning_effort": "none"}
SPELLINGS = (f"<{DSML} calls>", "<|DSML|calls>", "<||DSML||function_calls>")


def typed(engine: ScriptedEngine, text: str) -> list[int]:
    """One token a byte, but the mark's own token, which cannot be cut."""
    before, mark, after = text.partition(DSML)
    return engine.byte_ids(before) + (engine.ids(mark) if mark else []) + engine.byte_ids(after)


@pytest.mark.parametrize("prose", ["", "Let me look.", "\u65e5\u672c \U0001f389 \n\n"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_r01_a_call_is_found_wherever_its_markup_is_cut(
    api: Api, engine: ScriptedEngine, prose: str, spelling: str
) -> None:
    """Cut between all its bytes, and the mark's token; content holds no byte of it."""
    marker = typed(engine, spelling + "\n")
    rest = engine.ids(call(value("x", "a < b"))) + engine.ids(f"</{DSML} calls>")
    front = engine.byte_ids(prose)
    engine.play([front, marker, rest])
    expected = api.message(**PLAIN)
    assert expected["content"] == prose.rstrip("\n") and expected["finish"] == "tool_calls"
    (found,) = expected["tool_calls"]
    assert (found["name"], json.loads(found["arguments"])) == ("f", {"x": "a < b"})
    for n in range(1, len(marker)):
        engine.play([front + marker[:n], marker[n:] + rest])
        assert without_ids(api.streamed(**PLAIN)) == without_ids(expected), n


def test_r01_the_whole_markup_one_token_a_round(api: Api, engine: ScriptedEngine) -> None:
    text = "Look." + "\n\n" + block(call(value("x", "caf\u00e9 \U0001f389")), call(name="add"))
    engine.play([[token] for token in engine.ids(text)])
    one_by_one = api.both(**PLAIN)
    engine.play([text])
    assert without_ids(api.both(**PLAIN)) == without_ids(one_by_one)
    assert [c["arguments"] for c in one_by_one["tool_calls"]] == [
        '{"x": "caf\u00e9 \U0001f389"}',
        "{}",
    ]


def test_r02_parallel_calls_through_the_official_client(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    calls = [call(value("a", str(n), "false"), name="add") for n in range(3)]
    text = "Three." + "\n\n" + block(*calls)
    engine.play([[token] for token in engine.ids(text)])
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        body = question(tools=TOOLS, reasoning_effort="none")
        with client.chat.completions.stream(**body) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
    assert message.content == "Three."
    assert [c.function.name for c in message.tool_calls] == ["add"] * 3
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [
        {"a": n} for n in range(3)
    ]
    assert len({c.id for c in message.tool_calls}) == 3


@pytest.mark.parametrize("group", [1, 2, 7, 1000])
def test_r03_streamed_equals_whole(api: Api, engine: ScriptedEngine, group: int) -> None:
    for text in (
        "no call", "a</think>b", "thinking</think>\n\nLook.\n\n" + block(call(value("x", "1"))),
        block(call(value("x", '"q" \\ \n \u65e5'), value("y", "7", "false"))),
        "t</think>" + OPEN, "t</think>" + OPEN + call(value("x", "cut"))[:20],
    ):  # fmt: skip
        ids = engine.ids(text)
        engine.play([ids[at : at + group] for at in range(0, len(ids), group)])
        for fields in ({"tools": TOOLS}, PLAIN, {"tools": TOOLS, "max_tokens": 9}):
            api.both(**fields)


@pytest.mark.parametrize("group", [1, 1000])
def test_r04_a_call_inside_an_open_thinking_block(
    api: Api, engine: ScriptedEngine, group: int
) -> None:
    ids = engine.ids("I should look it up.\n\n" + block(call(value("x", "q"))))
    engine.play([ids[at : at + group] for at in range(0, len(ids), group)])
    found = api.both(tools=TOOLS)
    assert (found["reasoning"], found["content"]) == ("I should look it up.", "")
    assert found["finish"] == "tool_calls" and found["tool_calls"][0]["name"] == "f"


def test_r05_where_the_schema_is_silent_the_markup_decides(
    api: Api, engine: ScriptedEngine
) -> None:
    texts = {"n": "7", "opts": '{"b": 2}', "x": "null", "bad": "{oops"}
    values = [*(value(name, text, "false") for name, text in texts.items()), value("s", "7")]
    engine.play([block(call(*values))])
    found = api.both(tools=[tool("f")], reasoning_effort="none")
    assert json.loads(found["tool_calls"][0]["arguments"]) == {
        "n": 7, "opts": {"b": 2}, "x": None, "bad": "{oops", "s": "7"
    }  # fmt: skip


def test_r06_python_words_become_the_schemas_types(api: Api, engine: ScriptedEngine) -> None:
    properties = {
        "flag": {"type": "boolean"}, "off": {"type": ["boolean", "null"]},
        "none": {"type": ["string", "null"]}, "nil": {"type": "null"}, "name": {"type": "string"},
    }  # fmt: skip
    values = [value("flag", "True", "false"), value("off", "False", "false"),
              value("nil", "None", "false"), value("name", "None")]  # fmt: skip
    engine.play([block(call(*values))])
    found = api.both(tools=[tool("f", properties)], reasoning_effort="none")
    assert json.loads(found["tool_calls"][0]["arguments"]) == {
        "flag": True, "off": False, "nil": None, "name": "None"
    }  # fmt: skip


def test_r07_a_forced_call_is_begun_for_the_model(api: Api, engine: ScriptedEngine) -> None:
    """What the grammar adds to it is the engine's: `tests/unit/engine`."""
    named = {"type": "function", "function": {"name": "f"}}
    opening = engine.ids(f'\n\n<{DSML} calls>\n<{DSML} invoke name="f">\n')
    engine.play([value("x", "q") + f"</{DSML} invoke>\n</{DSML} calls>"])
    found = api.both(**PLAIN, tool_choice=named)
    assert found["tool_calls"][0]["name"] == "f" and found["finish"] == "tool_calls"
    request = engine.requests[-1]
    assert list(request.prompt_ids[-len(opening) :]) == opening and not request.forced_ids
    assert request.calls is not None and request.calls.called == "f"
    api.chat(tools=TOOLS, tool_choice=named)
    request = engine.requests[-1]
    assert list(request.forced_ids) == opening and request.in_reasoning
    assert request.calls is not None and request.calls.called == ""


def test_r08_choice_none_is_the_same_as_no_tools(api: Api, engine: ScriptedEngine) -> None:
    text = "Fine. " + block(call(value("x", "q")))
    engine.play([text])
    without = api.chat(reasoning_effort="none").json()
    found = api.chat(**PLAIN, tool_choice="none").json()
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids
    assert found["usage"] == without["usage"]
    assert engine.requests[1].calls is None
    assert found["choices"][0]["message"] == without["choices"][0]["message"]


def test_r09_empty_turns_are_marked_and_counted(api: Api, engine: ScriptedEngine) -> None:
    for text, is_empty in (("only thinking</think>", True), ("t</think>yes", False),
                           ("t" + block(call()), False)):  # fmt: skip
        engine.play([text])
        assert api.chat(tools=TOOLS).json()["stats"]["empty"] is is_empty, text
        last = json.loads(api.events(question(tools=TOOLS))[-2])
        assert last["stats"]["empty"] is is_empty
    assert 'twinspark_empty_replies_total{model_name="tiny"} 2.0' in api.http.get("/metrics").text


def test_r09_an_empty_turn_can_be_given_back(
    api: Api, engine: ScriptedEngine, server: LiveServer
) -> None:
    """The next prompt goes on from the empty reply's own tokens: its end and nothing else."""
    fields: dict[str, Any] = {"model": "tiny", "reasoning_effort": "none"}
    asked: list[Any] = question()["messages"]
    engine.play([])
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    message = client.chat.completions.create(messages=asked, **fields).choices[0].message
    assert message.content is None and not message.tool_calls
    first = engine.requests[-1].prompt_ids
    client.chat.completions.create(messages=[*asked, message, *asked], **fields)
    end = engine.tokenizer.eos_id
    assert engine.requests[-1].prompt_ids[: len(first) + 1] == (*first, end)
    given_back = client.responses.create(
        model="tiny", input=[*asked, {"role": "assistant", "content": None}, *asked]
    )
    assert given_back.status == "completed"


def test_r22_broken_arguments_in_the_history(api: Api, engine: ScriptedEngine) -> None:
    """They are rendered as they are; only what is no text at all is refused, by its place."""
    for arguments, status in (
        ("{", 200), ("", 200), ("[1, 2]", 200), ("7", 200), ([1], 200), (7, 200), (None, 200),
        ({"a": 1}, 200), ('{"a": NaN}', 200),
    ):  # fmt: skip
        past = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [past]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ]
        reply = api.chat(messages=messages, tools=TOOLS)
        assert reply.status_code == status, (arguments, reply.text)
    past["function"] = {"name": 5}
    reply = api.chat(messages=messages, tools=TOOLS)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("messages[1].tool_calls[0].function")


def test_r63_a_call_in_the_history_is_what_the_model_wrote(
    api: Api, engine: ScriptedEngine
) -> None:
    """parse(markup), sent back as history, renders to the same ids."""
    markup = block(call(value("x", "a < b \u65e5"), value("n", '{"k": [1, 2.5]}', "false")))
    engine.play(["Look.\n\n" + markup])
    reply = api.chat(**PLAIN).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"}
    messages = [{"role": "user", "content": "Hello"}, reply, result]
    api.chat(**PLAIN, messages=messages)
    wrote = engine.ids("Look.\n\n" + markup)
    prompt = list(engine.requests[-1].prompt_ids)
    assert any(prompt[n : n + len(wrote)] == wrote for n in range(len(prompt)))


def test_r77_interleaved_streams_parse_as_they_do_alone(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    """Parser state belongs to one request."""
    texts = [
        f"thought {n}</think>say {n}\n\n" + block(call(value("x", f"v{n}")), call(name="add"))
        for n in range(16)
    ]

    def rounds(request: object) -> list[list[int]]:
        number = int(engine.tokenizer.decode(list(request.prompt_ids)).split("number ")[1][:2])
        return [[token] for token in engine.ids(texts[number])]

    engine.answer(rounds)
    engine.round_s = 0.001

    def run(number: int) -> dict:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            return without_ids(Api(http).streamed(f"number {number:02}", tools=TOOLS))

    alone = [run(number) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(run, range(16))) == alone
    assert alone[3]["reasoning"] == "thought 3" and alone[3]["content"] == "say 3"


def test_only_the_first_call_without_parallel_calls(api: Api, engine: ScriptedEngine) -> None:
    engine.play([block(call(value("x", "1")), call(name="add"))])
    found = api.both(**PLAIN, parallel_tool_calls=False)
    assert [c["name"] for c in found["tool_calls"]] == ["f"]
    request = engine.requests[-1]
    assert request.calls is not None and request.calls.parallel is False


def test_r50_reasoning_left_out_by_the_client_is_put_back(api: Api, engine: ScriptedEngine) -> None:
    """Present, absent and under either name give the same prompt; an empty one is taken at its
    word."""
    engine.play(["a plan</think>", block(call(value("x", "q")))])
    message = api.chat(tools=TOOLS).json()["choices"][0]["message"]
    bare = {k: v for k, v in message.items() if not k.startswith("reasoning")}
    tail = [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}]
    prompts = []
    for fields in (
        {"reasoning": "a plan", "reasoning_content": "a plan"}, {"reasoning": "a plan"},
        {"reasoning_content": "a plan"}, {}, {"reasoning_content": None},
    ):  # fmt: skip
        messages = [{"role": "user", "content": "Hello"}, bare | fields, *tail]
        found = api.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()
        api.chat(messages=messages, tools=TOOLS)
        assert list(engine.requests[-1].prompt_ids) == found["tokens"]
        prompts.append(found["tokens"])
    assert all(prompt == prompts[0] for prompt in prompts)
    assert "a plan" in engine.tokenizer.decode(prompts[0])


def test_what_is_put_back_is_told_and_can_be_refused(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["a plan</think>", block(call(value("x", "q")))])
    message = api.chat(tools=TOOLS).json()["choices"][0]["message"]
    bare = {k: v for k, v in message.items() if not k.startswith("reasoning")}
    tail = [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}]
    first = {"role": "user", "content": "Hello"}
    counts, prompts = [], []
    for fields, more in (
        ({}, {}),
        ({"reasoning_content": ""}, {}),
        ({}, {"restore_reasoning": False}),
    ):
        reply = api.chat(messages=[first, bare | fields, *tail], tools=TOOLS, **more).json()
        counts.append(reply["stats"]["restored_reasoning"])
        prompts.append(list(engine.requests[-1].prompt_ids))
    assert counts == [1, 0, 0]
    assert prompts[1] == prompts[2] != prompts[0]


def test_refusals_of_tools_name_their_place(api: Api) -> None:
    for fields, param in (
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ):  # fmt: skip
        reply = api.post(CHAT, question(**fields))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), fields


def test_a_limit_inside_a_call_says_length(api: Api, engine: ScriptedEngine) -> None:
    engine.play([block(call(value("x", "a long value that is cut")))])
    ids = engine.ids(block(call(value("x", "a long value that is cut"))))
    found = api.both(**PLAIN, max_tokens=len(ids) - 12)
    assert found["finish"] == "length"
    assert found["tool_calls"][0]["arguments"].startswith('{"x": "a long')
    with pytest.raises(ValueError):
        json.loads(found["tool_calls"][0]["arguments"])
    assert replace(engine.requests[-1], request_id="").calls is not None
