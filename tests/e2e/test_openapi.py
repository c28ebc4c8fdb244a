"""The description of the API holds: every route answers as it says, whatever is sent."""

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.fake_engine import FakeEngine
from tests.live_server import serve_in_thread

from twinspark.server.openapi import describe

CHECKS = [
    not_a_server_error, content_type_conformance, response_schema_conformance,
    status_code_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def url(small_tokenizer):
    with serve_in_thread(FakeEngine(small_tokenizer), small_tokenizer) as live:
        yield live.url


SCHEMA = schemathesis.openapi.from_dict(describe(has_keys=False))
OPERATIONS = {op.label: op for found in SCHEMA.get_all_operations() for op in [found.ok()]}
MODES = {"as described": GenerationMode.POSITIVE, "not as described": GenerationMode.NEGATIVE}


CASES = [
    (label, mode) for label in OPERATIONS for mode in MODES
    if mode == "as described" or OPERATIONS[label].body
]  # fmt: skip


@pytest.mark.parametrize(("label", "mode"), CASES)
def test_every_route_answers_as_described(url: str, label: str, mode: str) -> None:
    operation = OPERATIONS[label]
    seen: set[int] = set()

    @seed(7)
    @settings(
        max_examples=25, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=MODES[mode]))
    def answers(case: schemathesis.Case) -> None:
        reply = case.call(base_url=url, timeout=20)
        case.validate_response(reply, checks=CHECKS)
        seen.add(reply.status_code)

    answers()
    if label.startswith("POST") and mode == "as described":
        assert 200 in seen  # what is described is not all refused


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ROUTES = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
}
TAKEN = {
    "chat": [{"bad_words": []}, {"truncate_prompt_tokens": None}, {"verbosity": "medium"}],
    "completions": [
        {"bad_words": []}, {"prompt": [300]}, {"prompt": ["a", [300]]}, {"prompt": ["a"] * 32},
        {"tools": []}, {"banned_token_ids": []},
    ],
    "messages": [{"seed": 3}, {"thinking": {"type": "disabled"}}],
    "responses": [
        {"tools": [{"type": "web_search"}]}, {"tools": [{"type": "web_search_preview"}, FUNCTION]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION]}]},
        {"background": False}, {"truncation": "disabled"}, {"top_logprobs": 0},
        {"text": {"verbosity": "medium"}}, {"include": ["reasoning.encrypted_content"]},
    ],
    "tokenize": [{"prompt": "a"}, {"prompt": "a", "messages": None}, CHAT, CHAT | {"prompt": None}],
    "detokenize": [{"tokens": []}, {"tokens": [300]}],
}  # fmt: skip
REFUSED = {
    "chat": [{"bad_words": ["a"]}, {"verbosity": "low"}, {"audio": {}}, {"allowed_token_ids": []},
             {"approximations": ["none-such"]}, {"banned_token_ids": [-1]}],
    "completions": [
        {"bad_words": ["a"]}, {"prompt": []}, {"prompt": ["a"] * 33}, {"prompt": [[]]},
        {"prompt": [-1]}, {"prompt": ["a", 1]}, {"prompt": None}, {"top_logprobs": 1},
    ],
    "messages": [{"seed": "x"}, {"thinking": {"type": "maybe"}}],
    "responses": [
        {"background": True}, {"truncation": "auto"}, {"top_logprobs": 2}, {"prompt": {"id": "p"}},
        {"tools": [{"type": "mcp"}]}, {"tools": [{"type": "namespace", "name": "n"}]},
        {"tools": [FUNCTION | {"name": "a b"}]}, {"text": {"verbosity": "low"}},
        {"include": ["message.output_text.logprobs"]}, {"min_p": 2},
    ],
    "tokenize": [{}, {"prompt": None}, CHAT | {"prompt": "a"}, CHAT | {"temperature": -1}],
    "detokenize": [{}, {"tokens": [-1]}, {"tokens": "a"}],
}  # fmt: skip
BODIES = [
    (route, fields, is_taken)
    for is_taken, found in ((True, TAKEN), (False, REFUSED))
    for route in found
    for fields in found[route]
]


@pytest.mark.parametrize(("route", "fields", "is_taken"), BODIES)
def test_what_is_described_is_what_is_taken(
    url: str, route: str, fields: dict, is_taken: bool
) -> None:
    path, body = ROUTES[route]
    reply = httpx.post(url + path, json=body | fields, timeout=20)
    assert reply.status_code == (200 if is_taken else 400), reply.text
    document = describe(has_keys=False)
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"] | {"components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body | fields) == is_taken


def test_the_document_names_every_route(url: str) -> None:
    document = httpx.get(url + "/openapi.json").json()
    assert document["openapi"] == "3.1.0" and "security" not in document
    names = document["components"]["schemas"]
    text = httpx.get(url + "/openapi.json").text
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in names
    chat = names["ChatBody"]["properties"]
    assert chat["top_p"]["anyOf"][0] == {"minimum": 0, "maximum": 1, "type": "number"}
    assert "default" not in str(chat) and "title" not in chat["top_p"]
    for path, methods in document["paths"].items():
        for method in methods:
            status = httpx.request(method, url + path.replace("{", "").replace("}", "")).status_code
            assert status not in (405, 500), (path, method)
