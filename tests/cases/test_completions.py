"""Plain completions: prompts, echo, scores as lm-eval reads them, filling in the middle."""

import json
import threading
from typing import Any

import httpx
import pytest
from tests.cases.api import COMPLETIONS, Api
from tests.live_server import serve_in_thread
from tests.scripted_engine import ScriptedEngine

from twinspark.server.completion_replies import Scores
from twinspark.text.tokenizer import BOS, FIM_BEGIN, FIM_END, FIM_HOLE, Tokenizer


def run(api: Api, **body: Any) -> dict[str, Any]:
    reply = api.post(COMPLETIONS, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


def streamed(api: Api, **body: Any) -> tuple[dict[int, str], dict[int, dict[str, list[Any]]]]:
    """Text and log-probabilities of each choice of a stream, joined."""
    text: dict[int, str] = {}
    scores: dict[int, dict[str, list[Any]]] = {}
    for item in api.events(body, COMPLETIONS)[:-1]:
        for choice in json.loads(item)["choices"]:
            index = choice["index"]
            text[index] = text.get(index, "") + choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                scores.setdefault(index, {}).setdefault(name, []).extend(values)
    return text, scores


def test_a_prompt_gets_the_begin_token_once(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["\n\nyes </think> no"])
    begin = engine.tokenizer.bos_id
    assert texts(run(api, prompt="Two")) == ["\n\nyes  no"]
    assert texts(run(api, prompt=BOS + "Two")) == ["\n\nyes  no"]
    run(api, prompt="<\uff5cUser\uff5c>Two")
    first, second, third = engine.requests
    assert first.prompt_ids == second.prompt_ids == (begin, *engine.ids("Two"))
    assert third.prompt_ids[:2] == (begin, engine.tokenizer.user_id)
    assert not first.in_reasoning and first.calls is None


def test_token_ids_run_exactly_as_given(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["yes"])
    run(api, prompt=[5, 6, 7])
    assert engine.requests[0].prompt_ids == (5, 6, 7)
    for prompt, param in (
        ([5, 4096], "prompt"), ([], "prompt"), ([5, "x"], "prompt"), ([5, True], "prompt"),
        ([5, -1], "prompt"), (None, "prompt"), (7, "prompt"), ({}, "prompt"), ([[]], "prompt[0]"),
        (["a", 5], "prompt[1]"), ([[5], [5.0]], "prompt[1]"), ([5, [5]], "prompt"),
        (["a"] * 33, "prompt"),
    ):  # fmt: skip
        reply = api.post(COMPLETIONS, {"prompt": prompt})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), prompt
    assert "4096" in api.post(COMPLETIONS, {"prompt": [5, 4096]}).json()["error"]["message"]
    assert api.post(COMPLETIONS, {"prompt": ["a"] * 20, "n": 2}).status_code == 400


def test_several_prompts_are_several_choices(api: Api, engine: ScriptedEngine) -> None:
    engine.answer(lambda r: [f"{r.prompt_ids[-1]} {r.sampling.choice_index}"])
    reply = run(api, prompt=[[5, 6], [7]], n=2)
    assert texts(reply) == ["6 0", "6 1", "7 0", "7 1"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 3
    ends = reply["stats"]["choices"]
    assert reply["usage"]["completion_tokens"] == sum(end["completion_tokens"] for end in ends)
    assert ends[0]["seed"] == ends[1]["seed"] and len({r.request_id for r in engine.requests}) == 4
    assert streamed(api, prompt=[[5, 6], [7]], n=2)[0] == dict(enumerate(texts(reply)))
    assert texts(run(api, prompt=["a", "b"])) == texts(run(api, prompt=["a", "b"], best_of=1))
    assert api.post(COMPLETIONS, {"prompt": "a", "best_of": 2}).status_code == 400


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["caf\u00e9 \U0001f389 two", [0, 700, 701, 4000]])
def test_echo_with_log_probabilities(
    api: Api, engine: ScriptedEngine, num_top: int, prompt: Any
) -> None:
    """What lm-eval reads: one entry a token, prompt first, offsets into the text, chosen in top."""
    engine.play([[token] for token in engine.byte_ids(" na\u00efve \U0001f44d!")])
    body = {"prompt": prompt, "echo": True, "logprobs": num_top, "return_token_ids": True}
    reply = run(api, **body)
    (choice,) = reply["choices"]
    ids = engine.ids(prompt) if isinstance(prompt, str) else prompt
    text = engine.tokenizer.decode(ids)
    assert choice["text"] == text + " na\u00efve \U0001f44d!"
    found = choice["logprobs"]
    all_ids = [*ids, *reply["stats"]["token_ids"]]
    assert {len(values) for values in found.values()} == {len(all_ids)}
    for n, token in enumerate(all_ids):
        data = engine.tokenizer.token_bytes(token)
        name, offset = found["tokens"][n], found["text_offset"][n]
        if name.startswith("bytes:"):
            assert bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) == data
        else:
            assert name.encode() == data
            assert choice["text"][offset:].startswith(name) or token == engine.tokenizer.eos_id
        if n == 0 and not isinstance(prompt, str):
            assert found["token_logprobs"][n] is found["top_logprobs"][n] is None
            continue
        assert found["token_logprobs"][n] == engine.score(token, 0).logprob
        assert num_top <= len(found["top_logprobs"][n]) <= num_top + 1
        assert name in found["top_logprobs"][n]
    joined, scores = streamed(api, **body)
    assert joined[0] == choice["text"] and scores[0] == found


def test_echo_alone_and_log_probabilities_alone(api: Api, engine: ScriptedEngine) -> None:
    engine.play([" four"])
    (choice,) = run(api, prompt="Two and", echo=True)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Two and four", None)
    assert engine.requests[-1].sampling.prompt_logprobs is None
    (choice,) = run(api, prompt="Two and", logprobs=1)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 5]
    assert engine.requests[-1].sampling.prompt_logprobs is None
    (choice,) = run(api, prompt="Two and", echo=True, logprobs=1, max_tokens=1)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(engine.ids("Two and")) + 1


def test_prompt_log_probabilities_by_id(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["x"])
    (choice,) = run(api, prompt=[5, 6, 256], prompt_logprobs=2)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None and set(second) == {"256", "257", "6"} and set(third) == {"256", "257"}
    assert second["256"]["rank"] == 1 and second["6"]["rank"] is None
    assert second["6"]["logprob"] == engine.score(6, 0).logprob
    assert (
        api.post(COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}).status_code
        == 400
    )


def test_filling_in_the_middle(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["middle"])
    assert engine.tokenizer.special_id(FIM_HOLE) is not None
    assert texts(run(api, prompt="def f(", suffix="return x")) == ["middle"]
    expected = engine.ids(BOS + FIM_BEGIN + "def f(" + FIM_HOLE + "return x" + FIM_END)
    assert list(engine.requests[-1].prompt_ids) == expected
    run(api, prompt="x", suffix="")
    assert list(engine.requests[-1].prompt_ids) == engine.ids(BOS + "x")
    assert api.post(COMPLETIONS, {"prompt": [5], "suffix": "y"}).status_code == 400
    assert api.post(COMPLETIONS, {"prompt": "x", "suffix": "y", "echo": True}).status_code == 400


def test_r31_fields_reach_the_engine_or_are_refused(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["yes"])
    fields = {
        "temperature": "0.5", "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -1,
        "max_tokens": "9", "stop": "q", "ignore_eos": True, "draft": False, "min_tokens": 2,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "logit_bias": {"20": -5}, "banned_token_ids": [21], "allowed_token_ids": [22],
        "loop_guard": True, "logprobs": 3,
    }  # fmt: skip
    run(api, prompt="x", **fields, priority="background", cache_salt="s", deadline_ms=900)
    request = engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5, 0.25, 7, 0.125
    )  # fmt: skip
    assert (sampling.seed, sampling.max_tokens, sampling.stop) == (2**64 - 1, 9, ("q",))
    assert (sampling.ignore_eos, sampling.draft, sampling.min_tokens) == (True, False, 2)
    assert sampling.logit_bias == ((20, -5.0),) and sampling.banned_ids == (21,)
    assert (sampling.allowed_ids, sampling.loop_guard, sampling.logprobs) == ((22,), "gentle", 3)
    assert (request.priority, request.cache_salt, request.deadline_ms) == ("background", "s", 900)
    for name, value in (
        ("tools", [1]), ("tool_choice", "required"), ("reasoning_effort", "low"),
        ("thinking_budget", 5), ("stop_token_ids", [1]), ("bad_words", ["x"]), ("logprobs", 21),
        ("logprobs", True), ("prompt_embeds", "x"), ("skip_special_tokens", False),
        ("use_beam_search", True), ("truncate_prompt_tokens", 5), ("max_tokens", 0),
    ):  # fmt: skip
        reply = api.post(COMPLETIONS, {"prompt": "x", name: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_unknown_fields_are_listed(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["yes"])
    reply = api.post(COMPLETIONS, {"prompt": "x", "mood": 1, "user": "me", "messages": []})
    assert reply.headers["x-twinspark-ignored-fields"] == "mood, messages"
    reply = api.post(COMPLETIONS, {"prompt": "x", "store": False, "metadata": {}, "suffix": None})
    assert "x-twinspark-ignored-fields" not in reply.headers


def test_long_prompts_are_shaped_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of 20,000 tokens take a while to write; streams go on meanwhile."""
    engine = ScriptedEngine(tokenizer, context=100_000)
    engine.play(["end"])
    threads: set[str] = set()
    block = Scores.prompt_block

    def watched(self: Scores, *args: Any) -> Any:
        threads.add(threading.current_thread().name)
        return block(self, *args)

    monkeypatch.setattr(Scores, "prompt_block", watched)
    ids = [500 + n % 3000 for n in range(20_000)]
    body = {"prompt": ids, "echo": True, "logprobs": 1}
    with serve_in_thread(engine, tokenizer) as live, httpx.Client(base_url=live.url) as http:
        api = Api(http)
        whole = run(api, **body)["choices"][0]["logprobs"]
        assert streamed(api, **body)[1][0] == whole
        tokens = {"tokens": ids}
        text = api.post("/detokenize", tokens).json()["prompt"]
        names = api.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert threads == {"twinspark-worker"} and len(whole["tokens"]) == 20_002
    assert len(names["token_strs"]) == names["count"]
