"""Drafters that know the truth and do with it what a test wants; the engine obeys them.

The truth of a request is its reply by the oracle (serial, alone), found by its seed: seeds tell
requests apart.
"""

import random

from twinspark.engine.speculation import Speculation


class TruthDrafter:
    """Proposes by a rule that sees the true continuation.

    Args:
        truth: seed -> (prompt length, true reply).
        rule: (true tokens from the proposal's first place on, DraftNeed) -> proposed ids; too long
            proposals are cut by the engine.
    """

    def __init__(self, truth, rule):
        self._truth, self._rule = truth, rule

    def propose(self, needs):
        proposals = []
        for need in needs:
            prompt_tokens, reply = self._truth[need.chooser.rule.seed]
            start = need.position - prompt_tokens + 1
            proposals.append(self._rule(list(reply[start:]), need))
        return proposals


def all_right(true, need):
    return true


def all_wrong(vocab_size=364):
    def rule(true, need):
        return [(token + 1) % vocab_size for token in [*true, 0, 0][: need.depth]]

    return rule


def right_then_wrong(right, width, vocab_size=364):
    """`right` true tokens, then wrong ones up to `width`."""

    def rule(true, need):
        wrong = [(token + 1) % vocab_size for token in [*true, *[0] * width][right:width]]
        return [*true[:right], *wrong][:width]

    return rule


def random_depth(seed, vocab_size=364):
    """Any number of tokens up to 15, right up to a random place."""
    rng = random.Random(seed)

    def rule(true, need):
        return right_then_wrong(rng.randint(0, 15), rng.randint(0, 15), vocab_size)(true, need)

    return rule


def adversarial(seed, *, end_id, special_ids=(), vocab_size=364):
    """End tokens in odd places, special ids, one id over and over, nothing, far too much."""
    rng = random.Random(seed)

    def rule(true, need):
        kind = rng.randrange(6)
        if kind == 0:
            return []
        if kind == 1:
            return [end_id] * 15
        if kind == 2:
            return [*true[: rng.randint(0, 4)], end_id, *true]
        if kind == 3:
            return [rng.choice([0, vocab_size - 1, *special_ids]) for _ in range(15)]
        if kind == 4:
            return [need.token] * 40
        return [*true, *[end_id, 0] * 20]

    return rule


def speculate(engine, *args, **settings):
    """Give an engine another policy; returns it."""
    engine._speculation = Speculation(*args, **settings)
    return engine._speculation
