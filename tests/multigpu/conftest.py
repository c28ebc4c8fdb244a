"""Pairs that are ended whatever happens."""

import pytest
from tests.multigpu.pair import Pairs


@pytest.fixture
def pairs():
    found = Pairs()
    yield found
    found.close()
