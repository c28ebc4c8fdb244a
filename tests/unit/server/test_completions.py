"""The plain completions route: what may stop other replies is done in a thread."""

import threading
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import serve_in_thread

from twinspark.server import completions
from twinspark.server.prompting import THREAD_CONTAINERS
from twinspark.text.tokenizer import Tokenizer


@pytest.mark.parametrize("num_lists", [1, THREAD_CONTAINERS])
def test_fields_of_a_heavy_body_are_read_in_a_thread(
    small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_lists: int
) -> None:
    where: list[str] = []
    read = completions.ignored_fields

    def noted(body: Mapping[str, Any]) -> list[str]:
        where.append(threading.current_thread().name)
        return read(body)

    monkeypatch.setattr(completions, "ignored_fields", noted)
    body = {"prompt": "x", "max_tokens": 1, "nonsense": 1, "metadata": {"a": [[]] * num_lists}}
    with serve_in_thread(FakeEngine(small_tokenizer), small_tokenizer) as live:
        reply = httpx.post(live.url + "/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-twinspark-ignored-fields"] == "nonsense"
    assert [name == "twinspark-worker" for name in where] == [num_lists > 1]
