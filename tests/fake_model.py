"""A model without tensors' weight: logits are a pure function of the tokens so far.

State lies where the real model has it: a running hash of every position in the pages its slot is
bound to, windows of the last positions in rings of the slot, one for the encoder and one for each
decoder layer above F. Nothing is ever cleared. A wrong page table, a missing copy, a state of
another position, a cone that ends too early or a row on foreign state ends in an assertion or in
other logits.
"""

import hashlib
from types import SimpleNamespace

import numpy as np
import torch

from twinspark.engine.core import Engine
from twinspark.messages import Admitted, Failed, Finished, PromptScores, TokenDelta, Waiting
from twinspark.model.step import DraftResult, StepOutput

HISTORY = 3
BLOCK = 5
WINDOW = 4
LEVELS = 3  # layers F.. of the fake; the cone needs LEVELS * (WINDOW - 1) + 1 rows
RING = WINDOW + 32
ENCODER_GAP = LEVELS * (WINDOW - 1) + 1
PRUNED, MIXED = 1 << 20, 1 << 21  # stand for approximations in the hash


class FakeCaches:
    """Pages, rings and page tables of all slots.

    Attributes:
        saves: (position, encoder_only) of every saved state, in order.
        loads: positions of the loaded ones.
        copies: pages that were copied.
    """

    state_bytes = 100
    encoder_state_bytes = 40

    def __init__(self, num_slots, max_tokens, *, page_tokens, num_pages):
        own = -(-max_tokens // page_tokens)
        self.page_tokens = page_tokens
        self.pages = [[None] * page_tokens for _ in range(num_pages or num_slots * own)]
        self.tables = [list(range(s * own, (s + 1) * own)) for s in range(num_slots)]
        self.rings = [[[None] * RING for _ in range(LEVELS)] for _ in range(num_slots)]
        self.window_start = [0] * num_slots
        self.saves, self.loads, self.copies = [], [], 0

    def bind(self, slot, pages):
        assert len(set(pages)) == len(pages) and all(0 <= p < len(self.pages) for p in pages)
        self.tables[slot] = list(pages)
        self.window_start[slot] = 0

    def copy_page(self, source, target):
        assert source != target
        self.pages[target] = list(self.pages[source])
        self.copies += 1

    def save_state(self, slot, position, *, encoder_only=False):
        self.saves.append((position, encoder_only))
        start = 0 if encoder_only else self.window_start[slot]
        levels = []
        for level in range(1 if encoder_only else LEVELS):
            first = max(position - WINDOW + 1, start if level else 0, 0)
            levels.append([self.window(slot, level, q) for q in range(first, position)])
        return position, start, levels

    def load_state(self, slot, position, state):
        saved, start, levels = state
        assert saved == position
        self.loads.append(position)
        self.window_start[slot] = start
        for level, values in enumerate(levels):
            for q, value in enumerate(values, position - len(values)):
                self.put_window(slot, level, q, value)

    def window(self, slot, level, position):
        found = self.rings[slot][level][position % RING]
        assert found is not None and found[0] == position, f"no window row {position} at {level}"
        return found[1]

    def put_windows(self, slot, level, first, values):
        """Write windows, None is none; gives them and those before them that are there, by place.

        More rows may come than a ring holds, so what they read is taken before it is overwritten.
        """
        ring = self.rings[slot][level]
        staged = {q: ring[q % RING][1] for q in range(max(first - WINDOW + 1, 0), first)
                  if ring[q % RING] is not None and ring[q % RING][0] == q}  # fmt: skip
        for q, value in enumerate(values, first):
            if value is not None:
                self.put_window(slot, level, q, value)
                staged[q] = value
        return staged

    def put_window(self, slot, level, position, value):
        self.rings[slot][level][position % RING] = (position, value)

    def entry(self, slot, position):
        return self.pages[self.tables[slot][position // self.page_tokens]][
            position % self.page_tokens
        ]

    def put_entry(self, slot, position, entry):
        page = self.tables[slot][position // self.page_tokens]
        self.pages[page][position % self.page_tokens] = entry

    def check_pages(self, slot, end):
        """The chain of hashes is whole over the newest pages and at every page's edge."""
        near = max(end - 2 * self.page_tokens, 0)
        edges = range(0, near, self.page_tokens)
        for q in (*edges, *range(near, end)):
            token, marks, value = self.entry(slot, q)
            before = self.entry(slot, q - 1)[2] if q else b""
            assert value == row_value(before, token, marks), f"foreign state at {q}"


class FakePass:
    """Rows on their way: layer 0 writes what encoders write, F.. one level each, others nothing.

    Attributes:
        step: whose rows.
        next_layer: the first that has not been run.
        slots: of the rows.
        values: what the newest layer gave, by row.
        staged: by slot and level, what its rows and the ones before them may read of windows.
        dropped: slots that are left out.
    """

    def __init__(self, model, step, caches):
        self.step, self.next_layer, self.dropped = step, 0, set()
        self._model, self._caches = model, caches
        self.slots = [span.slot for span in step.spans for _ in range(span.count)]
        self.values = [None] * len(self.slots)
        self.staged = {span.slot: {} for span in step.spans}

    def advance(self, end):
        assert self.next_layer < end <= self._model.config.num_hidden_layers
        for layer in range(self.next_layer, end):
            row = 0
            for span, history in zip(self.step.spans, self.step.history, strict=True):
                part = slice(row, row + span.count)
                if span.slot not in self.dropped:
                    self.values[part] = self._run(layer, span, history, part)
                row += span.count
        self.next_layer = end

    def _run(self, layer, span, history, part):
        model, values = self._model, self.values[part]
        staged = self.staged[span.slot]
        if layer == 0:
            return model.run_encoder(span, history, self.step.ids_T[part], self._caches, staged)
        level = layer - model.config.first_decoder_layer
        return values if level < 0 else model.run_level(level, span, self._caches, staged)

    def drop(self, slot):
        self.dropped.add(slot)


class FakeModel:
    """Implements what the engine needs of a model.

    Attributes:
        calls: (slot, first, count, prompt_end) of the spans of each forward pass.
        spans: the spans themselves.
        caches: the newest ones.
        broken_after: forward passes that succeed before one raises; None is all.
        nan_slots: slots whose logits turn to NaN.
        on_forward: called before each forward pass, and each further part of one.
    """

    def __init__(self, *, vocab_size=364, end_id=None, end_bias=0.0, context=4096, drafts=True):
        decoder = 3
        self.config = SimpleNamespace(
            vocab_size=vocab_size,
            max_position_embeddings=context,
            num_nextn_predict_layers=3 if drafts else 0,
            dspark_block_size=BLOCK,
            engram_max_ngram_size=HISTORY + 1,
            num_hidden_layers=decoder + LEVELS,
            first_decoder_layer=decoder,
            sliding_window=WINDOW,
            encoder_gap=ENCODER_GAP,
            cone_rows=lambda layer: (decoder + LEVELS - 1 - layer) * (WINDOW - 1) + 1,
            hidden_size=8, hc_mult=2, num_attention_heads=2, head_dim=4, index_topk=4,
            num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=8,
        )  # fmt: skip
        self.calls, self.spans = [], []
        self.draft_calls = 0
        self.caches = None
        self.broken_after = None
        self.nan_slots = set()
        self.on_forward = None
        self._end_id, self._end_bias = end_id, end_bias

    def new_caches(self, num_slots, max_tokens, *, page_tokens=16, num_pages=None, **_settings):
        self.caches = FakeCaches(
            num_slots, max_tokens, page_tokens=page_tokens, num_pages=num_pages
        )
        return self.caches

    def forward(self, step, caches):
        begun = self.start(step, caches)
        self.advance(begun)
        return self.finish(begun)

    def start(self, step, caches):
        if self.broken_after is not None and len(self.calls) >= self.broken_after:
            raise RuntimeError("the device is on fire")
        if self.on_forward is not None:
            self.on_forward()
        slots = [span.slot for span in step.spans]
        assert len(set(slots)) == len(slots)
        self.calls.append([(s.slot, s.first, s.count, s.prompt_end) for s in step.spans])
        self.spans.append(step.spans)
        assert sum(span.count for span in step.spans) == len(step.ids_T)
        return FakePass(self, step, caches)

    def advance(self, begun, end=None):
        if begun.next_layer > 0 and self.on_forward is not None:
            self.on_forward()
        begun.advance(self.config.num_hidden_layers if end is None else end)

    def finish(self, begun):
        """Logits of the wanted rows; slots that were dropped have none."""
        assert begun.next_layer == self.config.num_hidden_layers
        logits, found = [], []
        for number in sorted(set(begun.step.logit_rows)):
            slot, value = begun.slots[number], begun.values[number]
            if slot in begun.dropped:
                continue
            assert value is not None, "logits of a row that the cone leaves out"
            logits.append(self.logits(value))
            found.append(number)
            if slot in self.nan_slots:
                logits[-1][50] = np.nan
        array = np.array(logits, dtype=np.float32).reshape(-1, self.config.vocab_size)
        return StepOutput(logits_RV=torch.from_numpy(array), rows=found)

    def _run_span(self, span, history, ids, caches):
        """All layers of one span; what the last one gives by row, None outside of the cone."""
        staged = {}
        self.run_encoder(span, history, ids, caches, staged)
        for level in range(LEVELS):
            values = self.run_level(level, span, caches, staged)
        return values

    def run_encoder(self, span, history, ids, caches, staged):
        slot, first = span.slot, span.first
        before = [caches.entry(slot, q) for q in range(max(0, first - HISTORY), first)]
        assert list(history) == [entry[0] for entry in before]
        caches.check_pages(slot, first)
        value = caches.window(slot, 0, first - 1) if first else b""
        assert not before or value == before[-1][2], "window and pages disagree"
        is_prompt = span.prompt_end is not None
        assert not (is_prompt and span.is_pruned)
        assert not is_prompt or first + span.count <= span.prompt_end
        lowest = self._lowest(span)
        if span.mode == "replay" and first + span.count > lowest[0]:
            caches.window_start[slot] = max(lowest[0], 0)
        values = []
        for p, token in enumerate(ids, first):
            marks = (PRUNED if span.is_pruned else 0) | (MIXED if span.has_bf16_mixing else 0)
            value = row_value(value, token, marks)
            caches.put_entry(slot, p, (token, marks, value))
            values.append(value)
        staged[0] = caches.put_windows(slot, 0, first, values)
        return values

    def _lowest(self, span):
        if span.mode == "full":
            return [0] * LEVELS
        if span.mode == "replay":
            return [span.prompt_end - WINDOW] * LEVELS
        first_decoder = self.config.first_decoder_layer
        return [
            span.prompt_end - self.config.cone_rows(first_decoder + level)
            for level in range(LEVELS)
        ]

    def run_level(self, level, span, caches, staged):
        """One of layers F.., for the rows in its cone; None for the others."""
        lowest = self._lowest(span)[level]
        start = caches.window_start[span.slot] if level else 0
        values = []
        for p in range(span.first, span.first + span.count):
            if p < lowest:
                values.append(None)
                continue
            exact = [staged[0][q] for q in range(max(p - WINDOW + 1, 0), p + 1)]
            seen = [staged[level][q] for q in range(max(p - WINDOW + 1, start, 0), p + 1)]
            value = exact[-1]
            if seen != exact:
                value = hashlib.blake2b(b"".join(seen) + value, digest_size=8).digest()
            values.append(value)
        if level + 1 < LEVELS:
            staged[level + 1] = caches.put_windows(span.slot, level + 1, span.first, values)
        return values

    def draft(self, requests, caches, pick):
        self.draft_calls += 1
        results = []
        for number, request in enumerate(requests):
            before = request.position - 1
            state = caches.window(request.slot, 0, before) if request.position else b""
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


def row_value(before, token, marks):
    """The hash behind one more row; `marks` are the approximations that it ran under."""
    value = advance(before, token)
    return advance(value, marks) if marks else value


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
    """Collects events: tokens, last event and the rounds in which tokens came, by request.

    Attributes:
        waiting: what each request was told while it waited.
        cached: prompt tokens found saved, by request; there once it is admitted.
    """

    def __init__(self):
        self.tokens, self.last, self.deltas = {}, {}, {}
        self.waiting, self.cached, self.prompt_scores = {}, {}, {}

    def take(self, events):
        for event in events:
            assert event.request_id not in self.last, "an event after the last one"
            if isinstance(event, TokenDelta):
                assert event.token_ids
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                self.deltas.setdefault(event.request_id, []).append(len(event.token_ids))
            elif isinstance(event, Waiting):
                assert event.request_id not in self.cached, "it waits no more"
                self.waiting.setdefault(event.request_id, []).append(event)
            elif isinstance(event, Admitted):
                assert event.request_id not in self.cached, "admitted twice"
                self.cached[event.request_id] = event.cached_tokens
            elif isinstance(event, PromptScores):
                self.prompt_scores.setdefault(event.request_id, []).extend(event.scores)
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
