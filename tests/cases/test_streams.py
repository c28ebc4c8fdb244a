"""Framing, keepalives, true statuses, usage, stop strings, whole characters, limits.

R10 to R16, R25 to R28, R37, R47 to R49, R51, R64.
"""

import contextlib
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.cases.api import (
    CHAT,
    COMPLETIONS,
    Api,
    block,
    call,
    glue,
    payloads,
    question,
    tool,
    value,
)
from tests.live_server import LiveServer, serve_in_thread, wait_until
from tests.scripted_engine import ScriptedEngine

from twinspark.config.server import ServerConfig
from twinspark.messages import Admitted, Failed
from twinspark.text.detokenize import IncrementalDecoder
from twinspark.text.tokenizer import Tokenizer

PLAIN = {"reasoning_effort": "none"}
NUM_STREAMS = 1000


def test_r10_a_thousand_streams_each_with_one_finish_and_one_done(
    api: Api, engine: ScriptedEngine
) -> None:
    """Mixed lengths, thinking, stops, calls, limits of 1, choices, plain completions."""
    texts = ["hm</think>yes, Q and R S T", "hm", "t</think>" + block(call(value("x", "1"))), ""]
    dice = random.Random(7)
    for number in range(NUM_STREAMS):
        ids = engine.ids(dice.choice(texts)) * dice.randrange(4)
        size = dice.choice([1, 3, 40])
        engine.play([ids[at : at + size] for at in range(0, len(ids), size)])
        fields: dict[str, Any] = {}
        for name, options in (
            ("max_tokens", [None, 1, 9]), ("stop", [None, "R S T"]), ("n", [None, 1, 3]),
            ("stream_options", [None, {"include_usage": True}]), ("logprobs", [None, True]),
            ("tools", [None, [tool()]]),
        ):  # fmt: skip
            fields[name] = dice.choice(options)
        body, path = question(**fields), CHAT
        if number % 4 == 0:
            body, path = {"prompt": "x", **fields, "logprobs": None, "tools": None}, COMPLETIONS
        found = api.events(body, path)
        assert found[-1] == "[DONE]" and found.count("[DONE]") == 1
        chunks = [json.loads(item) for item in found[:-1]]
        with_usage = bool(fields["stream_options"])
        assert [c for c in chunks if not c["choices"]] == (chunks[-1:] if with_usage else [])
        reasons = [
            choice["index"] for c in chunks for choice in c["choices"] if choice["finish_reason"]
        ]
        assert sorted(reasons) == list(range(fields["n"] or 1))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_r11_comments_until_the_first_token(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str
) -> None:
    engine.play([0.35, "a", 0.3, "b"])
    config = ServerConfig(keepalive_s=0.1)
    body = question(**PLAIN) if path == CHAT else {"prompt": "x"}
    with (
        serve_in_thread(engine, tokenizer, config) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        text = http.post(path, json=body | {"stream": True}).text
    before, _, after = text.partition("data: ")
    assert 1 <= before.count(": keepalive\n\n") <= 20  # 3 on an idle machine
    assert ": keepalive" not in after and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_r12_early_refusals_are_real_statuses(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str
) -> None:
    refusal = Failed(request_id="", kind="capacity", message="no room", retry_after_s=7)
    body = question(**PLAIN) if path == CHAT else {"prompt": "x"}
    for keepalive_s, status in ((5.0, 503), (0.05, 200)):
        engine.play([0.2, refusal])
        config = ServerConfig(keepalive_s=keepalive_s)
        with (
            serve_in_thread(engine, tokenizer, config) as live,
            httpx.Client(base_url=live.url) as http,
        ):
            reply = http.post(path, json=body | {"stream": True})
            assert reply.status_code == status
            if status == 503:
                assert reply.headers["retry-after"] == "7"
                assert reply.json()["error"]["code"] == "capacity"
            else:
                error, done = payloads(reply.text)
                assert json.loads(error)["error"]["message"] == "no room" and done == "[DONE]"


def test_r12_one_choice_that_fails_fails_the_request(api: Api, engine: ScriptedEngine) -> None:
    refusal = Failed(request_id="", kind="capacity", message="no room")
    engine.answer(lambda request: [refusal] if request.sampling.choice_index else [1.0, "late"])
    assert api.chat(n=3, **PLAIN).status_code == 503
    assert len(engine.cancelled) == 1 and not engine.live


def test_r13_usage_comes_only_when_asked_for(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["yes"])
    for path, base in ((CHAT, question(**PLAIN)), (COMPLETIONS, {"prompt": "x"})):
        for options in (None, {}, {"include_usage": False}):
            found = api.events(base | {"stream_options": options}, path)
            assert all(json.loads(item)["choices"] for item in found[:-1])
        found = api.events(base | {"stream_options": {"include_usage": True}}, path)
        empty = [n for n, item in enumerate(found[:-1]) if not json.loads(item)["choices"]]
        assert empty == [len(found) - 2]


def test_r14_cached_tokens_in_every_form_and_in_the_metrics(
    api: Api, engine: ScriptedEngine
) -> None:
    """What the figure is comes from the engine: `tests/e2e/test_real_engine.py`."""

    def figure() -> float:
        lines = api.http.get("/metrics").text.splitlines()
        (line,) = [n for n in lines if n.startswith("vllm:prefix_cache_hits_total{")]
        return float(line.split()[-1])

    engine.play([Admitted(request_id="", cached_tokens=5), "yes"])
    before = figure()
    usage = api.chat(**PLAIN).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5
    options = {"stream_options": {"include_usage": True}}
    for path, body in ((CHAT, question(**PLAIN)), (COMPLETIONS, {"prompt": "some more text"})):
        streamed = json.loads(api.events(body | options, path)[-2])["usage"]
        assert streamed["prompt_tokens_details"]["cached_tokens"] == 5
        assert api.post(path, body).json()["usage"] == streamed
    assert figure() == before + 5 * 5


def test_r15_reasoning_is_a_part_of_the_completion(api: Api, engine: ScriptedEngine) -> None:
    for text, fields in (
        ("two and two</think>four", {}), ("t</think>" + block(call()), {"tools": [tool()]}),
        ("so it is</think>four STOP five", {"stop": "STOP"}), ("never closed", {}),
    ):  # fmt: skip
        engine.play([[token] for token in engine.ids(text)])
        usage = api.chat(**fields).json()["usage"]
        details = usage["completion_tokens_details"]
        thought = engine.ids(text.split("</think>")[0])
        num_ends = "</think>" not in text  # the end token itself
        assert details["reasoning_tokens"] == len(thought) + num_ends
        assert details["reasoning_tokens"] <= usage["completion_tokens"]
        body = question(**fields, stream_options={"include_usage": True})
        assert json.loads(api.events(body)[-2])["usage"] == usage


STOPS = [
    ("A B C D R S T U", ["R S T"], "A B C D "), ("code ```py", ["```"], "code "),
    ("a b c", [" "], "a"), ("go \U0001f389 on", ["\U0001f389"], "go "),
    ("\u65e5\u672c\u8a9e\u3002\u7d42\u308f\u308a", ["\u3002\u7d42"], "\u65e5\u672c\u8a9e"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "stop", "kept"), STOPS)
@pytest.mark.parametrize("group", [1, 2, 50])
def test_r25_stop_strings_across_tokens(
    api: Api, engine: ScriptedEngine, text: str, stop: list[str], kept: str, group: int
) -> None:
    ids = engine.byte_ids(text)
    engine.play([ids[at : at + group] for at in range(0, len(ids), group)])
    found = api.both(stop=stop, **PLAIN)
    assert (found["content"], found["finish"]) == (kept, "stop")
    body = {"prompt": "x", "stop": stop, "include_stop_str_in_output": True}
    (choice,) = api.post(COMPLETIONS, body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (kept + stop[0], "stop")
    streamed = [json.loads(item) for item in api.events(body, COMPLETIONS)[:-1]]
    assert "".join(c["choices"][0]["text"] for c in streamed) == kept + stop[0]


def test_r26_stops_sleep_in_reasoning_and_in_calls(api: Api, engine: ScriptedEngine) -> None:
    markup = block(call(value("x", "Question: a=b")))
    for text, content in (
        ("Question: 1=1</think>two Question: x", "two "), ("a=</think>so\n\n" + markup, "so"),
    ):  # fmt: skip
        engine.play([[token] for token in engine.ids(text)])
        found = api.both(stop=["Question:", "="], tools=[tool()])
        assert found["content"] == content and found["reasoning"]
        if markup in text:
            assert json.loads(found["tool_calls"][0]["arguments"]) == {"x": "Question: a=b"}
    engine.play(["1=1"])
    assert api.both(stop="=", **PLAIN)["content"] == "1"


SAMPLES = (
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd", "\U00020000\u9f98\u30c3",
    "e\u0301 n\u0303", "\U0001f1eb\U0001f1f7\U0001f1f3\U0001f1e6",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
)  # fmt: skip


@pytest.mark.parametrize("text", SAMPLES)
def test_r27_characters_are_whole(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer, text: str
) -> None:
    """One byte a round; the same ids give the same text as decoding them all at once."""
    ids = engine.byte_ids(text)
    engine.play([[token] for token in ids])
    for delta in api.events(question(**PLAIN))[:-1]:
        assert "\ufffd" not in delta
    assert api.both(**PLAIN)["content"] == text == tokenizer.decode(ids)
    broken = ids[:-1]
    engine.play([[token] for token in broken])
    decoder = IncrementalDecoder(tokenizer)
    assert api.both(**PLAIN)["content"] == decoder.feed(broken) + decoder.finish()


@pytest.mark.parametrize("text", SAMPLES)
def test_r28_split_characters_in_arguments(api: Api, engine: ScriptedEngine, text: str) -> None:
    before, after = block(call(value("x", "\0"))).split("\0")
    engine.play([engine.ids(before), *([token] for token in engine.byte_ids(text)),
                 engine.ids(after)])  # fmt: skip
    fields = {"tools": [tool()], **PLAIN}
    found = api.both(**fields)
    assert json.loads(found["tool_calls"][0]["arguments"]) == {"x": text}
    for item in api.events(question(**fields))[:-1]:
        item.encode()
        assert "\ufffd" not in item


def test_r47_overflow_has_the_words_agents_look_for(api: Api, engine: ScriptedEngine) -> None:
    context = engine.ready.max_context_tokens
    long = "word " * context
    for path, body, param in (
        (CHAT, question(long), "messages"), (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * (context + 1)}, "prompt"),
        (CHAT, question(max_tokens=context), "messages"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": context}, "prompt"),
        ("/v1/responses", {"input": long}, "input"),
        ("/v1/responses", {"input": "x", "max_output_tokens": context}, "input"),
    ):  # fmt: skip
        for stream in (False, True):
            reply = api.post(path, body | {"stream": stream})
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["type"] == "invalid_request_error"
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            words = (
                f"This model's maximum context length is {context} tokens. However, you requested "
            )
            assert error["message"].startswith(words)
            assert (
                int(error["message"].removeprefix(words).removeprefix("at least ").split()[0])
                > context
            )
    assert not engine.requests


def test_r48_both_limits_work_and_say_length(api: Api, engine: ScriptedEngine) -> None:
    engine.play([[token] for token in engine.byte_ids("x" * 200)])
    for fields in ({"max_tokens": 20}, {"max_completion_tokens": 20},
                   {"max_tokens": 50, "max_completion_tokens": 20}):  # fmt: skip
        reply = api.chat(**fields, **PLAIN).json()
        assert reply["usage"]["completion_tokens"] == 20
        assert reply["choices"][0]["finish_reason"] == "length"
    reply = api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 20}).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (
        "x" * 20,
        "length",
    )


@pytest.mark.parametrize("default", [None, 300, 10**6])
def test_r49_the_default_limit_is_capped_by_the_window(
    engine: ScriptedEngine, tokenizer: Tokenizer, default: int | None
) -> None:
    engine.play(["yes"])
    config = ServerConfig(default_max_tokens=default)
    with (
        serve_in_thread(engine, tokenizer, config) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        http.post(CHAT, json=question())
        http.post(COMPLETIONS, json={"prompt": "x"})
    for request in engine.requests:
        room = engine.ready.max_context_tokens - len(request.prompt_ids)
        assert request.sampling.max_tokens == min(default or room, room)


@pytest.mark.parametrize("setting", ["both", "reasoning_content", "reasoning", "none"])
def test_r51_reasoning_under_the_names_that_are_set(
    engine: ScriptedEngine, tokenizer: Tokenizer, setting: str
) -> None:
    engine.play(["a thought", "</think>", "an answer"])
    names = {"both": {"reasoning_content", "reasoning"}, "none": set()}.get(setting, {setting})
    with (
        serve_in_thread(engine, tokenizer, ServerConfig(reasoning_fields=setting)) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        message = http.post(CHAT, json=question()).json()["choices"][0]["message"]
        text = http.post(CHAT, json=question(stream=True)).text
    assert message["content"] == "an answer" and "think>" not in text
    assert {name for name in message if name.startswith("reasoning")} == names
    assert all(message[name] == "a thought" for name in names)
    chunks = [json.loads(item) for item in payloads(text)[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "reasoning"):
        joined = "".join(delta.get(name, "") for delta in deltas)
        assert joined == ("a thought" if name in names else "")


def test_unterminated_reasoning_is_surfaced_where_that_is_set(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """Prompt format 12.5: literal by default; as content where the server is told so."""
    engine.play(["only", " thoughts"])
    for is_on in (False, True):
        config = ServerConfig(surface_unterminated_reasoning=is_on)
        with (
            serve_in_thread(engine, tokenizer, config) as live,
            httpx.Client(base_url=live.url) as http,
        ):
            reply = http.post(CHAT, json=question()).json()
            streamed = glue(payloads(http.post(CHAT, json=question(stream=True)).text))
            cut = http.post(CHAT, json=question(max_tokens=1)).json()["choices"][0]["message"]
        message = reply["choices"][0]["message"]
        expected = ("only thoughts", None) if is_on else (None, "only thoughts")
        assert (message["content"], message.get("reasoning")) == expected
        assert reply["stats"]["empty"] is not is_on
        assert streamed["reasoning"] == "only thoughts"
        assert streamed["content"] == ("only thoughts" if is_on else "")
        assert cut["content"] is None and cut["reasoning"]


def test_r64_the_loop_guard_ends_exact_repetition(api: Api, engine: ScriptedEngine) -> None:
    """Off by default; the legal ones stay whole with it."""
    cycle = engine.byte_ids("abcdefghijklmnopqrstuv")
    paragraph = engine.byte_ids(" ".join(f"word{n}" for n in range(120))[:800])
    table = engine.byte_ids("0, " * 16 + "\n") * 15
    art = engine.byte_ids("".join(f"{'*' * n}{' ' * (40 - n)}|\n" for n in range(40)))
    for ids, is_loop in ((cycle * 50, True), (engine.byte_ids("x") * 200, True),
                         (paragraph * 10, True), (table, False), (art, False)):  # fmt: skip
        for in_thinking in (False, True):
            engine.play([ids])
            fields = {} if in_thinking else PLAIN
            ready = engine.ready.max_context_tokens
            limit = {"max_tokens": min(len(ids) + 1, ready - 200)}
            guarded = api.chat(loop_guard=True, **fields, **limit).json()
            assert (guarded["stats"]["cause"] == "loop") is is_loop
            if is_loop:
                assert guarded["usage"]["completion_tokens"] < len(ids)
            free = api.chat(**fields, **limit).json()
            assert free["stats"]["cause"] != "loop"


def test_r16_r37_a_failing_request_leaves_the_others_alone(
    api: Api, engine: ScriptedEngine
) -> None:
    """Four streams run while requests are refused and fail."""
    engine.round_s = 0.01
    engine.play([[token] for token in engine.byte_ids("y" * 60)])
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(api.streamed, f"s{n}", **PLAIN) for n in range(4)]
        assert api.chat(max_tokens=0).status_code == 400
        assert api.post(CHAT, {}).status_code == 400
        assert all(future.result()["content"] == "y" * 60 for future in running)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"tools": [tool()]}])
def test_r16_clients_that_leave_at_any_moment(
    server: LiveServer, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    """200 streams are dropped at random points; nothing stays behind, and the next is served."""
    engine.round_s = 0.001
    engine.play([[token] for token in engine.byte_ids("x" * 2000)])
    dice = random.Random(3)
    body = json.dumps(question(stream=True, **fields)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    for number in range(200):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(head.encode() + body[: None if number % 10 else dice.randrange(len(body))])
            for _ in range(dice.randrange(4)):
                raw.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    raw.recv(dice.randrange(1, 2000))
    wait_until(lambda: not engine.live and not server.state.open_replies, 30)
    num_choices = fields.get("n", 1)
    wait_until(lambda: len(engine.cancelled) == len(engine.requests), 30)
    assert len(engine.requests) % num_choices == 0 and len(engine.requests) > 100
    engine.play(["fine"])
    with httpx.Client(base_url=server.url, timeout=5) as http:
        assert Api(http).message(**PLAIN)["content"] == "fine"
