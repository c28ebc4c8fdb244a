"""The server over a scripted engine with the demo pack's tokenizer."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.cases.api import Api
from tests.live_server import LiveServer, serve_in_thread
from tests.scripted_engine import ScriptedEngine

import twinspark
from twinspark.text.tokenizer import Tokenizer

DEMO_TOKENIZER = Path(twinspark.__file__).parent / "demo" / "pack" / "tokenizer.json"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(DEMO_TOKENIZER)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
def server(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with serve_in_thread(engine, tokenizer) as live:
        yield live


@pytest.fixture
def api(server: LiveServer) -> Iterator[Api]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield Api(http)
