"""The API over the demo pack and its real engine process, as users run it."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from tests.cases.api import CHAT, COMPLETIONS, Api, question, tool
from tests.server_process import ServerProcess

SERVE = [sys.executable, "-m", "twinspark", "serve", "--port", "0"]
PLAIN = {"reasoning_effort": "none"}
CITY = tool(
    "weather",
    {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
)
CITY["function"]["parameters"]["required"] = ["city"]
NAMED = {"type": "function", "function": {"name": "weather"}}
TOWNS = ("Oslo", "Rome", "Bern", "Lima", "Kyiv")
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    process = ServerProcess(SERVE)
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


@pytest.fixture
def model(demo: ServerProcess) -> Iterator[Api]:
    with httpx.Client(base_url=demo.url, timeout=120) as http:
        yield Api(http)


def sha(model: Api, text: str, **fields: Any) -> str:
    reply = model.chat(text, **{"max_tokens": 24} | fields)
    assert reply.status_code == 200, reply.text
    found: str = reply.json()["stats"]["token_sha"]
    return found


def in_company(run: Callable[[int], None], count: int) -> None:
    """Requests that have nothing to do with each other: four at once take half as long."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(count)))


def test_r03_streamed_equals_whole_for_tool_prompts(model: Api) -> None:
    def run(n: int) -> None:
        fields = {"tools": [CITY], "max_tokens": 40, "seed": n, "temperature": 0.7 * (n % 2)}
        fields |= {"tool_choice": ("auto", NAMED, "required")[n % 3]}
        fields |= PLAIN if n % 4 else {"thinking_budget": 10}
        model.both(f"The weather in {TOWNS[n % 5]}, please.", **fields)

    in_company(run, 12)


@pytest.mark.parametrize("num_seeds", [16, pytest.param(50, marks=pytest.mark.slow)])
def test_r07_forced_calls_carry_the_required_parameters(model: Api, num_seeds: int) -> None:
    """Not strict, at temperature 1."""

    def run(seed: int) -> None:
        fields = PLAIN if seed % 2 else {"thinking_budget": 5}
        found = model.message(
            "Weather?", tools=[CITY], tool_choice=NAMED, seed=seed, temperature=1,
            max_tokens=200, **fields,
        )  # fmt: skip
        assert found["finish"] == "tool_calls", found
        arguments = json.loads(found["tool_calls"][0]["arguments"])
        jsonschema.validate(arguments, CITY["function"]["parameters"])

    in_company(run, num_seeds)


def test_r08_choice_none_is_the_same_as_no_tools(model: Api) -> None:
    for text in ("Use the weather tool for Oslo!", "Hello!"):
        replies = [
            model.chat(text, seed=3, max_tokens=30, **fields).json()
            for fields in ({}, {"tools": [CITY], "tool_choice": "none"})
        ]
        assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]
        assert replies[0]["stats"]["token_sha"] == replies[1]["stats"]["token_sha"]
        assert "DSML" not in json.dumps(replies[1]["choices"])


def test_r14_a_repeated_prompt_is_cached_and_counted(model: Api) -> None:
    def figure() -> float:
        lines = model.http.get("/metrics").text.splitlines()
        (line,) = [n for n in lines if n.startswith("vllm:prefix_cache_hits_total{")]
        return float(line.split()[-1])

    text = "A long story about a cat. " * 120
    before = figure()
    first = model.chat(text, max_tokens=3).json()["usage"]  # may find the head of others
    usages = [model.chat(text, max_tokens=3).json()["usage"]]
    body = question(text, max_tokens=3, stream_options={"include_usage": True})
    usages.append(json.loads(model.events(body)[-2])["usage"])
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert all(found > 0.9 * usages[0]["prompt_tokens"] for found in cached)
    head = first["prompt_tokens_details"]["cached_tokens"]
    assert figure() == before + head + sum(cached)


def test_r15_figures_agree_streamed_and_whole(model: Api) -> None:
    for fields in (
        {"thinking_budget": 12}, {"tools": [CITY], "tool_choice": NAMED, **PLAIN},
        {"stop": ["a"], **PLAIN}, {"max_tokens": 7},
    ):  # fmt: skip
        fields = {"seed": 5, "max_tokens": 50, **fields}
        usage = model.chat("What is 3 + 4?", **fields).json()["usage"]
        body = question("What is 3 + 4?", stream_options={"include_usage": True}, **fields)
        streamed = json.loads(model.events(body)[-2])["usage"]
        for found in (usage, streamed):
            details = found["completion_tokens_details"]
            assert 0 <= details["reasoning_tokens"] <= found["completion_tokens"]
            found.pop("prompt_tokens_details")  # the second request finds the first's prefix
            details.pop("accepted_prediction_tokens")  # how much is drafted is a matter of pace
            details.pop("rejected_prediction_tokens")
        assert usage == streamed
        thinks = "reasoning_effort" not in fields
        assert (usage["completion_tokens_details"]["reasoning_tokens"] > 0) is thinks


def test_r25_r26_stop_strings(model: Api) -> None:
    whole = model.message("Name three colors.", seed=1, max_tokens=40, **PLAIN)["content"]
    stop = whole[5:8]
    found = model.both("Name three colors.", seed=1, max_tokens=40, stop=[stop], **PLAIN)
    assert (found["content"], found["finish"]) == (whole[: whole.find(stop)], "stop")
    thought = model.message("Name three colors.", seed=1, max_tokens=80, thinking_budget=15)
    stop = thought["reasoning"][4:7]
    again = model.both("Name three colors.", seed=1, max_tokens=80, thinking_budget=15, stop=[stop])
    assert again["reasoning"] == thought["reasoning"]
    at = thought["content"].find(stop)
    assert again["content"] == (thought["content"] if at < 0 else thought["content"][:at])


def test_r29_a_seed_gives_one_reply_alone_in_company_and_undrafted(model: Api) -> None:
    fields = {"temperature": 2, "seed": 42}
    shas = {sha(model, "Tell me a story.", **fields) for _ in range(4)}
    shas.add(sha(model, "Tell me a story.", draft=False, **fields))
    with ThreadPoolExecutor(6) as pool:
        noise = [pool.submit(sha, model, f"Noise {n}", max_tokens=40) for n in range(4)]
        busy = [pool.submit(sha, model, "Tell me a story.", **fields) for _ in range(3)]
        shas |= {future.result() for future in busy}
        assert all(future.result() for future in noise)
    assert len(shas) == 1


def test_r29_a_seed_gives_the_same_reply_after_a_restart(model: Api) -> None:
    fields = {"temperature": 2, "seed": 42}
    again = ServerProcess(SERVE)
    try:
        again.wait_ready()
        with httpx.Client(base_url=again.url, timeout=120) as http:
            found = sha(Api(http), "Tell me a story.", **fields)
    finally:
        again.close()
    assert found == sha(model, "Tell me a story.", **fields)


def test_r30_replies_vary_without_a_seed(model: Api) -> None:
    asked = {"temperature": 2, "top_p": 1, "max_tokens": 40}  # however sure the pack is
    alone = [sha(model, "Tell me a story.", **asked) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: sha(model, "Tell me a story.", **asked), range(4)))
    assert len({*alone, *together}) >= 6


def test_r30_choices_differ_and_each_can_be_asked_for_again(model: Api) -> None:
    body = question("Tell me a story.", n=4, temperature=2, top_p=1, max_tokens=30)
    first = model.post(CHAT, body).json()
    shas = [choice["token_sha"] for choice in first["stats"]["choices"]]
    seeded = model.post(CHAT, body | {"seed": 7}).json()  # a drawn seed may repeat a short reply
    assert len({choice["token_sha"] for choice in seeded["stats"]["choices"]}) == 4
    assert first["usage"]["completion_tokens"] == sum(
        choice["completion_tokens"] for choice in first["stats"]["choices"]
    )
    again = model.post(CHAT, body | {"seed": first["stats"]["seed"]}).json()
    assert [choice["token_sha"] for choice in again["stats"]["choices"]] == shas
    alone = model.post(CHAT, body | {"seed": first["stats"]["seed"], "n": 1}).json()
    assert alone["stats"]["token_sha"] == shas[0]


def test_r31_fields_change_the_reply(model: Api) -> None:
    fields = {"temperature": 0, "max_tokens": 12, "return_token_ids": True, **PLAIN}
    base = model.chat("Hello!", **fields).json()["stats"]["token_ids"]
    first = base[0]
    for change in (
        {"logit_bias": {str(first): -100}}, {"banned_token_ids": [first]},
        {"allowed_token_ids": [n for n in range(300, 400) if n != first]},
    ):  # fmt: skip
        changed = model.chat("Hello!", **fields, **change).json()["stats"]["token_ids"]
        assert changed[0] != first, change
    asked = {**fields, "max_tokens": 50, "ignore_eos": True}
    free = model.chat("Name three colors.", **asked).json()["stats"]["token_ids"]
    for change in (
        {"repetition_penalty": 5}, {"frequency_penalty": 2}, {"presence_penalty": 2},
        {"max_tokens": 2}, {"temperature": 2, "seed": 1},
    ):  # fmt: skip
        changed = model.chat("Name three colors.", **asked | change).json()["stats"]["token_ids"]
        assert changed != free, change
    ending = {**asked, "max_tokens": 5, "logit_bias": {"1": 100}}  # the end, whatever was asked
    assert model.chat("Hello!", **ending).json()["usage"]["completion_tokens"] == 5
    ended = model.chat("Hello!", **ending | {"ignore_eos": False}).json()
    assert ended["usage"]["completion_tokens"] == 1
    assert ended["choices"][0]["finish_reason"] == "stop"


def test_r32_scores_are_the_same_however_the_reply_is_made(model: Api) -> None:
    fields = {"logprobs": True, "top_logprobs": 5, "max_tokens": 30, "seed": 9}

    def scores(**more: Any) -> Any:
        reply = model.chat("Tell me a story.", **fields, **more).json()
        content = reply["choices"][0]["logprobs"]["content"]
        assert len(content) == reply["usage"]["completion_tokens"]
        return content

    alone = scores()
    assert scores(draft=False) == alone
    with ThreadPoolExecutor(3) as pool:
        assert all(found == alone for found in pool.map(lambda _: scores(), range(3)))
    chunks = [
        json.loads(item)["choices"][0]
        for item in model.events(question("Tell me a story.", **fields))[:-1]
    ]
    assert [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == alone


def test_r35_a_schema_binds_the_answer_only(model: Api) -> None:
    schema = {"name": "sum", "schema": SUM}
    asked = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 120}

    def run(seed: int) -> None:
        effort = (25, 100)[seed % 2]
        fields = {"seed": seed, "reasoning_effort": effort, "thinking_budget": 20, **asked}
        both = model.both if seed < 4 else model.message
        found = both("Two and three?", **fields)
        assert found["reasoning"] and found["finish"] == "stop", found
        jsonschema.validate(json.loads(found["content"]), SUM)

    in_company(run, 20)


def test_forms_are_the_same_drafted_and_not(model: Api) -> None:
    forms: list[dict[str, Any]] = [
        {"guided_regex": "[a-c]{3,9}"}, {"guided_choice": ["yes", "no", "perhaps"]},
        {"response_format": {"type": "json_object"}, "max_tokens": 24},
    ]  # fmt: skip

    def run(number: int) -> None:
        asked = {"seed": 3, "max_tokens": 60, **PLAIN, **forms[number]}
        drafted = sha(model, "Well?", **asked)
        assert sha(model, "Well?", draft=False, **asked) == drafted
        assert model.both("Well?", **asked)["content"]

    in_company(run, len(forms))


def test_r48_limits_are_exact(model: Api) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        reply = model.chat("Tell me a story.", ignore_eos=True, **{name: 20}).json()
        assert reply["usage"]["completion_tokens"] == 20
        assert reply["choices"][0]["finish_reason"] == "length"


def test_r52_a_budget_closes_the_thinking_block(model: Api) -> None:
    def run(seed: int) -> None:
        asked = {"seed": seed, "thinking_budget": 10, "max_tokens": 20}
        reply = model.chat("Why is the sky blue?", **asked).json()
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 10
        assert reply["choices"][0]["message"]["content"] is not None
        if seed < 4:
            undrafted = sha(model, "Why is the sky blue?", draft=False, **asked)
            assert undrafted == reply["stats"]["token_sha"]

    in_company(run, 20)


def test_r68_other_salts_share_nothing(model: Api) -> None:
    text = "A story about a dog and a bird. " * 60

    def cached(**fields: Any) -> int:
        usage = model.chat(text, max_tokens=2, **fields).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached() < 60  # the head of any prompt without a salt
    assert cached() > 400 and cached(cache_salt="b") > 400


def test_r69_every_turn_reuses_all_but_its_new_part(model: Api) -> None:
    messages = [{"role": "user", "content": "Tell me about cats. " * 40}]
    before = 0
    for turn in range(6):
        reply = model.chat(messages=messages, max_tokens=20, tools=[CITY]).json()
        usage = reply["usage"]
        page = 256
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] >= before - page
        before = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        message = reply["choices"][0]["message"]
        messages += [message, {"role": "user", "content": f"More, part {turn}."}]


def test_prompt_scores_at_several_at_once(model: Api) -> None:
    """What lm-eval asks for: the same numbers alone and in company."""
    bodies = [
        {"prompt": f"The cat number {n} sat on the mat.", "echo": True, "logprobs": 3,
         "max_tokens": 1, "temperature": 0} for n in range(8)
    ]  # fmt: skip

    def run(body: dict[str, Any]) -> Any:
        reply = model.post(COMPLETIONS, body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["logprobs"]

    alone = [run(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, bodies)) == alone
    together = model.post(COMPLETIONS, bodies[0] | {"prompt": [b["prompt"] for b in bodies]})
    assert [choice["logprobs"] for choice in together.json()["choices"]] == alone
    for found in alone:
        assert all(value is not None and value <= 0 for value in found["token_logprobs"])
        assert (
            max(found["top_logprobs"][-1], key=found["top_logprobs"][-1].get) == found["tokens"][-1]
        )
