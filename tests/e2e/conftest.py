"""A live server over a scripted engine, and real clients for it."""

from collections.abc import Iterator

import openai
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, serve_in_thread

from twinspark.text.tokenizer import Tokenizer


@pytest.fixture
def engine(small_tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(small_tokenizer)


@pytest.fixture
def server(engine: FakeEngine, small_tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with serve_in_thread(engine, small_tokenizer) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with make_client(server) as opened:
        yield opened


def make_client(server: LiveServer, **options: object) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=10, **options
    )
