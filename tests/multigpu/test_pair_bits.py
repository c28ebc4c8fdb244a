"""Two ranks on two GPUs give the replies of one, log-probabilities included, bit for bit."""

import pytest
from tests.multigpu.pair import DEVICES, ON_GPUS, replies_of

from twinspark import LLM, Sampling

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


def test_engines_on_both_cards_of_one_process():
    """Each records on its own card, whichever was there first, and they take turns."""
    sampling = Sampling(max_tokens=24, seed=5, temperature=0.8, ignore_eos=True)
    texts = ("The capital of France is", "def add(a, b):")
    settings = {"slots": 2, "max_context_tokens": 2048}
    first, second = (LLM.demo(device=device, **settings) for device in DEVICES)
    with first, second:
        wanted = [first.generate(text, sampling, reuse=False).token_ids for text in texts]
        assert [second.generate(text, sampling, reuse=False).token_ids for text in texts] == wanted
        again = [reply.token_ids for reply in first.generate_many(texts, sampling)]
        assert again == wanted
        for llm in (first, second) if ON_GPUS else ():
            assert "decode" in {kind for kind, _, _ in llm.engine._runner._rounds.recorded}
