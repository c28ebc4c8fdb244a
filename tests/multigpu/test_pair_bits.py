"""Two ranks on two GPUs give the replies of one, log-probabilities included, bit for bit."""

import pytest
from tests.multigpu.pair import replies_of

pytestmark = pytest.mark.multigpu


@pytest.fixture(scope="module")
def alone(lasting_pairs):
    """Drafted, batched and on saved prefixes: `pair_child.py` has compared these already."""
    found = replies_of(lasting_pairs.alone())
    assert found["hits"] and all(len(ids) > 5 for ids in found["long"])
    return found


@pytest.mark.parametrize("mode", ["replies", "eager"])
def test_two_ranks_give_the_bits_of_one(pairs, alone, mode):
    """Rounds in graphs that hold the exchanges, and launched one by one."""
    zero, one = pairs(mode)
    assert replies_of(zero) == alone
    code, said = one.end()
    assert code == 0, said
    assert "gone" not in said and "Traceback" not in said
