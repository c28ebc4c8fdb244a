"""Two ranks on two GPUs give the replies of one, log-probabilities included, bit for bit."""

import pytest
from tests.multigpu.pair import replies_of

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("mode", ["replies", "eager"])
def test_two_ranks_give_the_bits_of_one(pairs, mode):
    """Rounds in graphs that hold the exchanges, and launched one by one.

    `pair_child.py` has compared what is drafted, batched and on saved prefixes already. Eager
    rounds choose on the host, whose exp may part from the device's: each has an oracle of its own.
    """
    wanted = replies_of(pairs.alone("alone" if mode == "replies" else "alone-eager"))
    assert wanted["hits"] and all(len(ids) > 5 for ids in wanted["long"])
    zero, one = pairs(mode)
    assert replies_of(zero) == wanted
    code, said = one.end()
    assert code == 0, said
    assert "gone" not in said and "Traceback" not in said
