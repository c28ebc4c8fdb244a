"""The fake model behind recorded rounds: it reads tensors that stay where they are, as a device.

What the host stages for a row goes through the same buffers as with a real model: tokens, places
and, in place of Engram rows, the tokens before the row. All of it is compared with the state.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch
from tests.fake_model import BLOCK, HISTORY, FakeModel, advance

from twinspark.engine.rounds import Rounds
from twinspark.model.step import Span

NOBODY = -2  # no token before a row


class Recorder:
    """Work is done again on the same tensors, which is what a CUDA graph does.

    Attributes:
        replays: by the name of the work, how often it was done again.
    """

    def __init__(self):
        self.replays = {}

    def record(self, work):
        work()  # a graph runs it once before it is recorded
        name = work.func.__name__
        self.replays.setdefault(name, 0)

        def replay():
            self.replays[name] += 1
            return work()

        return SimpleNamespace(replay=replay)


class RecordedModel(FakeModel):
    """Rows on tensors; padding has slot -1 and gets logits that nothing can be chosen from.

    Attributes:
        walked: requests of every pass whose tokens the host picked.
    """

    walks_on_device = has_draft = True
    device = torch.device("cpu")
    engram_fields = ((torch.int32, (1, HISTORY)),)
    rehearsal = staticmethod(nullcontext)

    def __init__(self, **settings):
        super().__init__(**settings)
        self.config.image_token_id = 1 << 30
        self._blocks = []
        self.walked = []

    def new_caches(self, num_slots, max_tokens, **settings):
        caches = super().new_caches(num_slots, max_tokens, **settings)
        caches.layout = SimpleNamespace(max_tokens=max_tokens)
        caches.starts_S = None
        caches.reset = lambda slot: caches.window_start.__setitem__(slot, 0)
        return caches

    def put_engram(self, rows, into):
        (array,) = into
        place = 0
        for window in rows:
            ids = [NOBODY] * HISTORY + list(window.history) + list(window.ids)
            for row in range(len(window.ids)):
                end = len(ids) - len(window.ids) + row
                array[place, 0] = ids[end - HISTORY : end]
                place += 1

    def engram_tables(self, sent):
        return (sent[0].flatten(1),)

    def decode(self, round_, caches):
        columns = (round_.slots_T, round_.positions_T, round_.ids_T, round_.engram[0])
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        logits = np.full((len(rows), self.config.vocab_size), np.nan, np.float32)
        slots = list(dict.fromkeys(slot for slot, *_ in rows if slot >= 0))
        for slot in slots:
            own = [n for n, row in enumerate(rows) if row[0] == slot]
            assert own == list(range(own[0], own[0] + len(own))), "rows of a slot stand together"
            first = rows[own[0]][1]
            assert [rows[n][1] for n in own] == list(range(first, first + len(own)))
            assert first + len(own) <= round_.most_tokens
            ids = [rows[n][2] for n in own]
            history = [token for token in rows[own[0]][3] if token != NOBODY]
            seen = [NOBODY] * (HISTORY - len(history)) + history + ids
            for n, _ in enumerate(own):
                assert rows[own[n]][3] == seen[n : n + HISTORY], "other tokens before a row"
            span = Span(slot=slot, first=first, count=len(own))
            values = self._run_span(span, history, ids, caches)
            for n, value in zip(own, values, strict=True):
                logits[n] = self.logits(value)
                if slot in self.nan_slots:
                    logits[n][50] = np.nan
        for slot, _, token, before in rows:
            assert slot >= 0 or (token == -1 and not any(before)), "padding holds something"
        return torch.from_numpy(logits)

    def draft_block(self, round_, caches):
        self._blocks = []
        for slot, position in zip(
            round_.slots_n.tolist(), round_.positions_n.tolist(), strict=True
        ):
            state = b""
            if slot >= 0 and position:
                state = caches.window(slot, 0, position - 1)
            self._blocks.append(state)
        return torch.zeros(len(self._blocks) * BLOCK), torch.zeros(len(self._blocks) * BLOCK)

    def walk(self, requests, hidden_TD, base_TV, pick):
        self.walked.append(len(requests))
        return self.draft(requests, self.caches, pick)

    def walk_by(self, tokens_n, hidden_TD, base_TV, choose):
        self.draft_calls += 1
        states, entering, tokens = list(self._blocks), tokens_n, []
        for j in range(BLOCK):
            rows = []
            for n, token in enumerate(entering.tolist()):
                states[n] = advance(states[n], max(token, 0))
                right = states[n][0] % 10 < 7
                rows.append(self.logits(states[n] if right else advance(states[n], 0)))
            entering = choose(j, torch.from_numpy(np.array(rows)))
            tokens.append(entering)
        confidence = torch.zeros(len(states), BLOCK)
        return torch.stack(tokens, dim=1), confidence


def record(engine, model):
    """Let an engine of this model run its rounds recorded; gives the recorder."""
    runner, recorder = engine._runner, Recorder()
    banned_V = engine._sampler.banned_V
    runner._rounds = Rounds(model, runner.caches, banned_V=banned_V, recorder=recorder)
    return recorder
