"""The golden data of the prompt format."""

import json

import pytest
from tests.real_tokenizer import GOLDEN


@pytest.fixture(scope="session")
def golden() -> dict:
    return json.loads(GOLDEN.read_text("utf-8"))
