"""Names, aliases, roles, efforts, encoding, seeds: R21, R23, R29 to R32, R57 to R62."""

import gzip
import json
import re
import threading
from typing import Any

import httpx
import pytest
from tests.cases.api import CHAT, COMPLETIONS, Api, block, call, question, tool, value
from tests.live_server import serve_in_thread
from tests.scripted_engine import ScriptedEngine

from twinspark.config.server import ServerConfig
from twinspark.server import prompting
from twinspark.server.chat_fields import NEUTRAL_VALUES, ChatFields
from twinspark.server.generation import seed_of
from twinspark.text.tokenizer import Tokenizer

PLAIN = {"reasoning_effort": "none"}
ROUTES = (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")


@pytest.mark.parametrize("path", ROUTES)
def test_r21_deep_nesting_is_refused_on_every_route(api: Api, path: str) -> None:
    for depth in (65, 10_000, 100_000):
        for name in ("messages", "x"):
            body = f'{{"{name}":{"[" * depth}{"]" * depth}}}'
            reply = api.http.post(path, content=body.encode())
            assert reply.status_code == 400
            assert "deeper than 64 levels" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_r23_what_is_no_request_names_the_field(api: Api, path: str) -> None:
    for body in (b"{:", b"", b"[]", b'{"model": 5}', b'{"prompt": NaN}', b'{"a": 1, "a": 2}',
                 b"{}"):  # fmt: skip
        reply = api.http.post(path, content=body)
        error = reply.json()["error"]
        assert reply.status_code == 400, body
        assert error["param"] and error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [*ROUTES, "/v1/messages", "/v1/responses"])
def test_r23_a_compressed_body_is_refused_as_such(api: Api, path: str) -> None:
    content = gzip.compress(b'{"prompt": "x", "input": "x", "tokens": []}')
    reply = api.http.post(path, content=content, headers={"content-encoding": "gzip"})
    assert reply.status_code == 415 and reply.headers["accept-encoding"] == "identity"
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and "'gzip'" in error["message"]
    assert api.http.get("/v1/models").status_code == 200  # over the same connection


@pytest.mark.parametrize("path", ROUTES)
def test_r24_the_connection_is_usable_after_a_refusal(api: Api, path: str) -> None:
    big = b"x" * 1_000_000
    for method, where, status in (
        ("POST", "/nope", 404), ("POST", path, 400), ("PUT", path, 405), ("GET", path, 405)
    ):  # fmt: skip
        reply = api.http.request(method, where, content=None if method == "GET" else big)
        assert reply.status_code == status
        assert status != 405 or reply.headers["allow"] == "POST"
        assert api.http.get("/v1/models").status_code == 200


def test_r29_r30_seeds(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """Without one the engine draws it; choices share one; the option derives it from the prompt."""
    engine.play(["x"])
    for is_on in (False, True):
        engine.requests.clear()
        config = ServerConfig(reproducible_seeds=is_on)
        with (
            serve_in_thread(engine, tokenizer, config) as live,
            httpx.Client(base_url=live.url) as http,
        ):
            http.post(CHAT, json=question())
            http.post(CHAT, json=question(n=3))
            http.post(CHAT, json=question(n=2, seed=42))
            http.post(COMPLETIONS, json={"prompt": ["a", "b"]})
        seeds = [request.sampling.seed for request in engine.requests]
        expected = [seed_of(request.prompt_ids) for request in engine.requests]
        assert seeds[4:6] == [42, 42]
        if is_on:
            assert seeds[:4] == [expected[0]] * 4 and seeds[6:] == expected[6:]
            assert expected[6] != expected[7] and 0 <= expected[0] < 2**64
        else:
            assert seeds[0] is None and len(set(seeds[1:4])) == 1 and seeds[1] is not None
            assert seeds[6:] == [None, None]
        choices = [request.sampling.choice_index for request in engine.requests]
        assert choices == [0, 0, 1, 2, 0, 1, 0, 0]


HONOURED: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "temperature", 0.5), "top_p": (0.5, "top_p", 0.5),
    "top_k": (3, "top_k", 3),
    "min_p": (0.5, "min_p", 0.5), "seed": (5, "seed", 5), "stop": (["x"], "stop", ("x",)),
    "ignore_eos": (True, "ignore_eos", True), "draft": (False, "draft", False),
    "max_tokens": (7, "max_tokens", 7), "max_completion_tokens": (7, "max_tokens", 7),
    "presence_penalty": (1, "presence_penalty", 1.0), "min_tokens": (3, "min_tokens", 3),
    "frequency_penalty": (1, "frequency_penalty", 1.0),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "logit_bias": ({"20": -100}, "logit_bias", ((20, -100.0),)),
    "banned_token_ids": ([5], "banned_ids", (5,)), "allowed_token_ids": ([5], "allowed_ids", (5,)),
    "thinking_budget": (5, "thinking_budget", 5), "loop_guard": (True, "loop_guard", "gentle"),
    "logprobs": (True, "logprobs", 0),
}  # fmt: skip
# Tested elsewhere by their effect, or only about how a reply is served.
ELSEWHERE = {
    "model", "n", "best_of", "stream", "stream_options", "return_token_ids", "top_logprobs",
    "include_stop_str_in_output", "priority", "deadline_ms", "max_queue_ms", "cache_salt",
    "approximations",
 "restore_reasoning"}  # fmt: skip


def test_r31_every_known_field_is_honoured_or_refused(api: Api, engine: ScriptedEngine) -> None:
    assert set(HONOURED) | ELSEWHERE == set(ChatFields.model_fields)
    engine.play(["x"])
    for name, (given, attribute, expected) in HONOURED.items():
        assert api.chat(**{name: given}).status_code == 200, name
        assert getattr(engine.requests[-1].sampling, attribute) == expected, name
        assert api.chat().status_code == 200
        assert getattr(engine.requests[-1].sampling, attribute) != expected, name
    for name in NEUTRAL_VALUES:
        reply = api.chat(**{name: "surprise"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    for fields in ({"n": 9}, {"best_of": 2}, {"approximations": ["x"]}, {"priority": "x"}):
        assert api.chat(**fields).status_code == 400


def test_unknown_fields_are_listed_wherever_they_stand(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["x"])
    past = {"id": "c", "function": {"name": "f", "arguments": "{}"}, "depth": 1}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
        {"role": "assistant", "tool_calls": [past], "mood": "good"},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    tools = [tool("f", examples=[]) | {"cost": 1}]
    reply = api.chat(messages=messages, tools=tools, mode="x", parallel_tool_calls=True)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-twinspark-ignored-fields"] == (
        "mode, messages.content.cache_control, messages.mood, messages.tool_calls.depth, "
        "tools.cost, tools.function.examples"
    )


def test_choices_are_apart_and_complete(api: Api, engine: ScriptedEngine) -> None:
    engine.round_s = 0.001
    engine.answer(lambda r: [*f"choice {r.sampling.choice_index}"])
    reply = api.chat(n=8, **PLAIN).json()
    contents = [choice["message"]["content"] for choice in reply["choices"]]
    assert contents == [f"choice {n}" for n in range(8)]
    joined = dict.fromkeys(range(8), "")
    roles = []
    for item in api.events(question(n=8, **PLAIN))[:-1]:
        for choice in json.loads(item)["choices"]:
            joined[choice["index"]] += choice["delta"].get("content") or ""
            roles += [choice["index"]] if "role" in choice["delta"] else []
    assert list(joined.values()) == contents and sorted(roles) == list(range(8))
    assert reply["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    assert len(reply["stats"]["choices"]) == 8


@pytest.mark.parametrize("group", [1, 5])
def test_r32_one_score_a_token_calls_and_reasoning_included(
    api: Api, engine: ScriptedEngine, group: int
) -> None:
    text = "hm</think>caf\u00e9\n\n" + block(call(value("x", "\U0001f389")))
    ids = engine.ids(text)
    engine.play([ids[at : at + group] for at in range(0, len(ids), group)])
    fields = {"logprobs": True, "top_logprobs": 5, "tools": [tool()], "return_token_ids": True}
    reply = api.chat(**fields).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    for entry, token in zip(content, reply["stats"]["token_ids"], strict=True):
        assert bytes(entry["bytes"]) == engine.tokenizer.token_bytes(token)
        assert entry["logprob"] == engine.score(token, 0).logprob
        assert [top["logprob"] for top in entry["top_logprobs"]] == [
            logprob for _, logprob in engine.score(token, 5).top
        ]
    chunks = [json.loads(item)["choices"][0] for item in api.events(question(**fields))[:-1]]
    assert [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == content


def prompt_of(api: Api, *messages: tuple[str, Any], **fields: Any) -> list[int]:
    asked = [{"role": role, "content": content} for role, content in messages]
    reply = api.post("/tokenize", {"messages": asked} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["tokens"]


def test_r56_part_types_of_chat_give_one_prompt(api: Api) -> None:
    plain = prompt_of(api, ("user", "a\n\nb"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of(api, ("user", parts)) == plain


def test_r57_developer_is_system_wherever_it_stands(api: Api) -> None:
    for places in (("S", "u"), ("u", "S", "u"), ("S", "S", "u"), ("u", "a", "S")):
        names = {"u": "user", "a": "assistant"}
        prompts = [
            prompt_of(api, *((names.get(p, role), f"text {p}") for p in places))
            for role in ("system", "developer")
        ]
        assert prompts[0] == prompts[1]


def test_r58_aliases_on_every_route(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.play(["x"])
    config = ServerConfig(model_aliases=("old", "a/b"))
    with (
        serve_in_thread(engine, tokenizer, config) as live,
        httpx.Client(base_url=live.url) as http,
    ):
        entries = http.get("/v1/models").json()["data"]
        assert [entry["id"] for entry in entries] == ["tiny", "old", "a/b"]
        context = engine.ready.max_context_tokens
        assert all(e["max_model_len"] == e["context_length"] == context for e in entries)
        for asked, named in (("old", "old"), ("a/b", "a/b"), ("gpt-4", "tiny"), (None, "tiny")):
            for path, body in (
                (CHAT, question()), (COMPLETIONS, {"prompt": "x"}),
                ("/v1/messages", question()), ("/v1/responses", {"input": "x"}),
            ):  # fmt: skip
                body = body | {"model": asked}
                assert http.post(path, json=body).json()["model"] == named, path
                text = http.post(path, json=body | {"stream": True}).text
                first = json.loads(re.sub(r"(?s)^.*?data: |\n\n.*", "", text))
                said = first.get("message") or first.get("response") or first
                assert said["model"] == named, path
            for path, body in (
                ("/v1/messages/count_tokens", question()), ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [300]}),
            ):  # fmt: skip
                assert http.post(path, json=body | {"model": asked}).status_code == 200, path
        assert http.get("/v1/models/a/b").json()["id"] == "a/b"
        missing = http.get("/v1/models/gpt-4")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_r59_effort_none_turns_thinking_off(api: Api, engine: ScriptedEngine, effort: str) -> None:
    engine.play(["plain"])
    for fields in ({"reasoning_effort": effort},
                   {"chat_template_kwargs": {"reasoning_effort": effort}},
                   {"chat_template_kwargs": {"thinking": False}}):  # fmt: skip
        found = api.both(**fields)
        assert (found["reasoning"], found["content"]) == ("", "plain")
        assert not engine.requests[-1].in_reasoning


def test_r60_markers_in_client_text_stay_text(api: Api, tokenizer: Tokenizer) -> None:
    """In user text, tool results, names, descriptions and arguments."""
    assert len(tokenizer.specials) > 5
    for literal in [*tokenizer.specials, "<\uff5cDSML\uff5c calls>", "</think>"]:
        counts = []
        for text in ("harmless", literal):
            past = {"id": "c", "type": "function",
                    "function": {"name": "f", "arguments": json.dumps({"x": text})}}  # fmt: skip
            messages = [
                {"role": "system", "content": text},
                {"role": "user", "content": text, "name": text},
                {"role": "assistant", "content": text, "reasoning": text, "tool_calls": [past]},
                {"role": "tool", "tool_call_id": "c", "content": text},
                {"role": "user", "content": [{"type": "text", "text": text}]},
            ]
            tools = [tool("f", {"x": {"type": "string", "description": text}}, description=text)]
            reply = api.post("/tokenize", {"messages": messages, "tools": tools})
            ids = reply.json()["tokens"]
            counts.append([ids.count(special) for special in tokenizer.specials.values()])
        assert counts[0] == counts[1], literal


def test_r61_every_effort_is_the_number_of_the_table(api: Api) -> None:
    numbers = {"low": 50, "medium": 75, "high": 75, "xhigh": 100, "max": 100, "ultra": 100}
    default = prompt_of(api, ("user", "x"))
    assert default == prompt_of(api, ("user", "x"), reasoning_effort=75)
    for word, number in numbers.items():
        by_number = prompt_of(api, ("user", "x"), reasoning_effort=number)
        assert prompt_of(api, ("user", "x"), reasoning_effort=word) == by_number
        kwargs = {"chat_template_kwargs": {"reasoning_effort": word}, "reasoning_effort": 1}
        assert prompt_of(api, ("user", "x"), **kwargs) == by_number


def test_r62_late_system_messages_stay_in_place(api: Api, tokenizer: Tokenizer) -> None:
    for place in (0, 2, 3):
        messages = [("user", "one"), ("assistant", "two"), ("user", "three")]
        messages.insert(place, ("system", "rule"))
        text = tokenizer.decode(prompt_of(api, *messages, tools=[tool()]))
        order = sorted(("one", "two", "three", "rule"), key=lambda w: text.rindex(w))
        expected = ["one", "two", "three"]
        expected.insert(place, "rule")
        assert order == expected


def test_tokenize_gives_what_the_chat_route_runs(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["x"])
    for fields in ({}, PLAIN, {"tools": [tool()]}, {"chat_template_kwargs": {"thinking": False}}):
        api.chat(**fields)
        found = api.post("/v1/tokenize", question(**fields)).json()
        assert found["tokens"] == list(engine.requests[-1].prompt_ids)
        assert found["count"] == len(found["tokens"])
        assert found["max_model_len"] == engine.ready.max_context_tokens


def test_tokenize_and_detokenize_texts(api: Api, tokenizer: Tokenizer) -> None:
    text = "caf\u00e9 <think> \U0001f389"
    body = {"prompt": text, "return_token_strs": True}
    found = api.post("/tokenize", body).json()
    assert found["tokens"] == [tokenizer.bos_id, *tokenizer.encode_full(text)]
    assert len(found["token_strs"]) == found["count"] and "<think>" in found["token_strs"]
    bare = api.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert bare == found["tokens"][1:]
    assert api.post("/v1/detokenize", {"tokens": bare}).json() == {"prompt": text}
    assert api.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for path, bad in (
        ("/tokenize", {}), ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}), ("/detokenize", {}),
        ("/detokenize", {"tokens": [10**6]}), ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {"tokens": [-1]}), ("/tokenize", {"prompt": "x " * 10**6}),
    ):  # fmt: skip
        assert api.post(path, bad).status_code == 400, bad
    reply = api.post("/tokenize", {"prompt": "x", "mood": 1})
    assert reply.headers["x-twinspark-ignored-fields"] == "mood"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_bodies_of_many_parts_are_read_beside_the_event_loop(
    api: Api, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads: dict[str, set[str]] = {}

    def watched(name: str) -> None:
        original = getattr(prompting, name)

        def run(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return original(*args, **options)

        monkeypatch.setattr(prompting, name, run)

    watched("read_request")
    watched("render_chat")
    engine.play(["x"])
    many = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(3001)]
    many[-2] |= {"reasoning": "why"}
    reply = api.post(path, {"messages": many})
    assert reply.status_code == 400 and "context" in reply.json()["error"]["code"]
    assert threads == {"read_request": {"twinspark-worker"}, "render_chat": {"twinspark-worker"}}
    threads.clear()
    assert api.post(path, question()).status_code == 200
    assert all(names != {"twinspark-worker"} for names in threads.values())


def test_reasoning_is_put_back_into_the_newest_messages_of_many(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine = ScriptedEngine(tokenizer, context=1 << 20)
    engine.play(["a plan</think>", block(call(value("x", "q")))])
    with serve_in_thread(engine, tokenizer) as live, httpx.Client(base_url=live.url) as http:
        api = Api(http)
        message = api.chat(tools=[tool()]).json()["choices"][0]["message"]
        bare = {k: v for k, v in message.items() if not k.startswith("reasoning")}
        past = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(5000)]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
        body = {"messages": [*past, *question()["messages"], bare, result], "tools": [tool()]}
        found = api.post("/tokenize", body).json()["tokens"]
        whole = api.post("/tokenize", body | {"messages": [
            *past, *question()["messages"], message, result]}).json()["tokens"]  # fmt: skip
    assert found == whole and "a plan" in tokenizer.decode(found)
