"""The description of the API holds: every route answers as it says, whatever is sent."""

import httpx
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
