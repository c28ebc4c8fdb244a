"""A model without tensors' weight: logits are a pure function of the tokens so far.

State is a running hash per slot and position, addressed absolutely and never cleared, so a wrong
rollback, a wrong history or a row that ran on foreign state shows in the logits.
"""

import hashlib
from types import SimpleNamespace

import numpy as np
import torch

from twinspark.engine.core import Engine
from twinspark.messages import Failed, Finished, TokenDelta
from twinspark.model.step import DraftResult, StepOutput

HISTORY = 3
BLOCK = 5


class FakeModel:
    """Implements what the engine needs of a model.

    Attributes:
        calls: (slot, first, count, is_prompt) of the spans of each forward pass.
        broken_after: forward passes that succeed before one raises; None is all.
        nan_slots: slots whose logits turn to NaN.
    """

    def __init__(self, *, vocab_size=364, end_id=None, end_bias=0.0, context=4096, drafts=True):
        self.config = SimpleNamespace(
            vocab_size=vocab_size,
            max_position_embeddings=context,
            num_nextn_predict_layers=3 if drafts else 0,
            dspark_block_size=BLOCK,
            engram_max_ngram_size=HISTORY + 1,
        )
        self.calls = []
        self.draft_calls = 0
        self.broken_after = None
        self.nan_slots = set()
        self._end_id, self._end_bias = end_id, end_bias

    def new_caches(self, num_slots, max_tokens):
        return SimpleNamespace(
            hashes=[[None] * max_tokens for _ in range(num_slots)],
            tokens=[[None] * max_tokens for _ in range(num_slots)],
        )

    def forward(self, step, caches):
        if self.broken_after is not None and len(self.calls) >= self.broken_after:
            raise RuntimeError("the device is on fire")
        slots = [span.slot for span in step.spans]
        assert len(set(slots)) == len(slots)
        self.calls.append([(s.slot, s.first, s.count, s.prompt_end) for s in step.spans])
        logits, row = [], 0
        wanted = set(step.logit_rows)
        for span, history in zip(step.spans, step.history, strict=True):
            tokens, hashes = caches.tokens[span.slot], caches.hashes[span.slot]
            assert list(history) == tokens[max(0, span.first - HISTORY) : span.first]
            for position in range(span.first, span.first + span.count):
                before = hashes[position - 1] if position else b""
                tokens[position] = step.ids_T[row]
                hashes[position] = advance(before, step.ids_T[row])
                if row in wanted:
                    logits.append(self.logits(hashes[position]))
                    if span.slot in self.nan_slots:
                        logits[-1][50] = np.nan
                row += 1
        assert row == len(step.ids_T)
        array = np.array(logits, dtype=np.float32).reshape(-1, self.config.vocab_size)
        return StepOutput(logits_RV=torch.from_numpy(array), rows=sorted(wanted))

    def draft(self, requests, caches, pick):
        self.draft_calls += 1
        results = []
        for number, request in enumerate(requests):
            state = caches.hashes[request.slot][request.position - 1] if request.position else b""
            tokens, token = [], request.token
            for j in range(BLOCK):
                state = advance(state, token)
                right = state[0] % 10 < 7
                logits_V = self.logits(state if right else advance(state, 0))
                token = pick(number, j, torch.from_numpy(logits_V))
                tokens.append(token)
            results.append(DraftResult(tokens=tokens, confidence=[0.0] * BLOCK))
        return results

    def logits(self, state):
        rng = np.random.default_rng(int.from_bytes(state, "little"))
        logits_V = rng.standard_normal(self.config.vocab_size, dtype=np.float32) * 4
        if self._end_id is not None:
            logits_V[self._end_id] += self._end_bias
        return logits_V


def advance(state, token):
    return hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=8).digest()


class ForcedDrafter:
    """Proposes the true continuation for a given number of tokens, then wrong ones.

    Args:
        replies: seed -> (prompt length, true reply); the seed tells requests apart.
        pattern: right drafts by call, used in a cycle.
        width: proposals a call.
    """

    def __init__(self, replies, pattern, *, width=5, vocab_size=364):
        self._replies, self._pattern, self._width = replies, pattern, width
        self._vocab_size = vocab_size
        self._calls = 0

    def propose(self, needs):
        proposals = []
        for need in needs:
            right = self._pattern[self._calls % len(self._pattern)]
            self._calls += 1
            prompt_len, reply = self._replies[need.chooser.rule.seed]
            start = need.position - prompt_len + 1
            tokens = list(reply[start : start + min(right, self._width)])
            while len(tokens) < self._width:
                place = start + len(tokens)
                true = reply[place] if place < len(reply) else 0
                tokens.append((true + 1) % self._vocab_size)
            proposals.append(tokens[: need.depth])
        return proposals


class Replies:
    """Collects events: tokens, last event and the rounds in which tokens came, by request."""

    def __init__(self):
        self.tokens, self.last, self.deltas = {}, {}, {}

    def take(self, events):
        for event in events:
            assert event.request_id not in self.last, "an event after the last one"
            if isinstance(event, TokenDelta):
                assert event.token_ids
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                self.deltas.setdefault(event.request_id, []).append(len(event.token_ids))
            else:
                assert isinstance(event, Finished | Failed)
                self.last[event.request_id] = event

    def summary(self, request_id):
        """Everything of a reply that must not depend on company, drafts or slots."""
        last = self.last[request_id]
        if isinstance(last, Failed):
            return ("failed", last.kind, last.code)
        return (
            tuple(self.tokens.get(request_id, ())),
            last.reason,
            last.stop_string,
            last.stats.token_sha,
            last.stats.completion_tokens,
        )


def run_all(engine: Engine, requests, *, arrivals=None):
    """Submit requests at their rounds (0 by default) and run until nothing is left."""
    replies = Replies()
    waiting = sorted(
        zip(arrivals or [0] * len(requests), range(len(requests)), requests, strict=True)
    )
    round_number = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= round_number:
            engine.submit(waiting.pop(0)[2])
        replies.take(engine.step())
        engine.check_integrity()
        round_number += 1
        assert round_number < 100_000
    return replies
