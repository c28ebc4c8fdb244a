"""Recorded rounds in the engine: same replies as eager steps, whatever is padded or recorded.

Rows are placed on the CPU through the ops' plain bodies; "recorded" work is done again on tensors
that stay where they are, which is what a CUDA graph does.
"""

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
import torch
from tests import tiny
from tests.small_tokenizer import small_tokenizer_json

from twinspark.config.engine import EngineConfig
from twinspark.engine import runner as runner_module
from twinspark.engine.choosing import Chooser
from twinspark.engine.core import Engine
from twinspark.engine.plan import Layers, PlannedRows, StepPlan
from twinspark.engine.rounds import FIRST_CONTEXT, Rounds
from twinspark.engine.sampler import ChoiceRule, Sampler
from twinspark.messages import Failed, Finished, GenerateRequest, Sampling, TokenDelta
from twinspark.model.loading import load_model
from twinspark.model.step import DraftRequest, Span, StepInput
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import PackWeights
from twinspark.text.grammar import text_form
from twinspark.text.tokenizer import Tokenizer

TOKEN_MAP = np.array([tiny.token_map(i) for i in range(512)])
TOKENIZER = Tokenizer(small_tokenizer_json())
IMAGE = tiny.CONFIG["image_token_id"]


class Again:
    """Work that is done again on the same tensors."""

    def __init__(self, work):
        self.work, self.replays = work, 0

    def replay(self):
        self.replays += 1
        return self.work()


class Recorder:
    """Keeps what was recorded."""

    def __init__(self):
        self.made = []

    def record(self, work):
        again = Again(work)
        work()
        self.made.append(again)
        return again


@pytest.fixture(scope="module")
def model():
    """TINY with rows that are placed, in float64 so that plain bodies are one arithmetic."""
    found = load_model(tiny.plain_path(), token_map=TOKEN_MAP, dtype=torch.float64)
    found._is_placed = found._draft._is_placed = True
    return found


@pytest.fixture
def walking(model, monkeypatch):
    """The same with a Markov head that chooses without the host."""
    name = f"mtp.{model.config.num_nextn_predict_layers - 1}.markov_head.head.weight"
    head_VR = PackWeights(open_pack(tiny.plain_path())).plain(name).double()
    monkeypatch.setattr(model._draft, "_markov_head_VR", head_VR)
    return model


def make_engine(model, recorder, *, clock=perf_counter, prefill_chunk=24, **settings):
    config = EngineConfig(
        max_context_tokens=112, page_tokens=16, prefill_chunk=prefill_chunk, **settings
    )
    engine = Engine(model, TOKENIZER, config, clock=clock)
    runner = engine._runner
    assert runner._rounds is None  # on a CPU nothing is recorded
    if recorder is not None:
        banned_V = engine._sampler.banned_V
        runner._rounds = Rounds(model, runner.caches, banned_V=banned_V, recorder=recorder)
    return engine


def replies(engine, *requests):
    found = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenDelta):
                found[event.request_id] += event.token_ids
            elif isinstance(event, Finished):
                found[event.request_id].append(event.stats.token_sha)
    return found


def request(number, **sampling):
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(tiny.prompt(20 + 9 * number, salt=number)),
        sampling=Sampling(seed=number, max_tokens=14, ignore_eos=True, **sampling),
        return_token_ids=True,
    )


def test_replies_are_those_of_eager_steps(model):
    requests = [request(n, temperature=0.8 * (n % 2)) for n in range(3)]
    wanted = replies(make_engine(model, None, slots=3, lookup=False), *requests)
    recorder = Recorder()
    found = replies(make_engine(model, recorder, slots=3, lookup=False), *requests)
    assert found == wanted
    again = [recorded.replays for recorded in recorder.made]
    assert len(again) > 2 and max(again) > 5  # several buckets, and rounds of one that follow


def test_forms_look_ahead_while_the_device_runs(model, monkeypatch):
    """After a round is launched and before anything of it is read; never on a CPU."""
    form = text_form({"guided_regex": "[a-z ]{30}"}).form
    asked = replace(odd(0, {"temperature": 0.9, "ignore_eos": False}), form=form)
    order = []

    def noted(name, owner, attribute):
        work = getattr(owner, attribute)

        def call(*args, **options):
            found = work(*args, **options)
            order.append(name)
            return found

        monkeypatch.setattr(owner, attribute, call)

    noted("ahead", Chooser, "look_ahead")
    wanted = replies(make_engine(model, None, slots=1), asked)
    assert not order
    engine = make_engine(model, Recorder(), slots=1)
    noted("launched", engine._runner._rounds, "run")
    noted("read", runner_module, "to_host")
    assert replies(engine, asked) == wanted
    rounds = "".join(word[0] for word in order).split("l")[1:]
    assert len(rounds) > 5 and all(each.startswith("ar") for each in rounds)


ODD = {
    "penalties": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": ((7, 3.0),)},
    "scores": {"logprobs": 2},
    "held": {"min_tokens": 9, "ignore_eos": False},
    "allowed": {"allowed_ids": tuple(range(5, 60))},
}


def odd(number, changes):
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(tiny.prompt(21, salt=number)),
        sampling=Sampling(**{"seed": number, "max_tokens": 12, "ignore_eos": True, **changes}),
        return_token_ids=True,
    )


@pytest.mark.parametrize("what", list(ODD))
def test_rows_that_the_host_must_see_sit_beside_rows_chosen_on_the_device(walking, what):
    requests = [odd(0, {"temperature": 0.9}), odd(1, {"temperature": 0.9, **ODD[what]})]
    wanted = replies(make_engine(walking, None, slots=2, lookup=False), *requests)
    engine = make_engine(walking, Recorder(), slots=2, lookup=False, prefill_chunk=64)
    asked = []
    runner = engine._runner
    run = runner._rounds.run

    def spy(windows, rules, ahead=()):
        asked.append([rule is not None for rule in rules])
        return run(windows, rules, ahead)

    runner._rounds.run = spy
    assert replies(engine, *requests) == wanted
    assert [True, False] in asked  # both ways in one round


def test_drafts_by_rules_are_those_that_the_host_picks(walking):
    caches = walking.new_caches(2, 64)
    for slot in range(2):
        ids = tiny.prompt(20, salt=slot)
        walking.forward(
            StepInput(spans=(Span(slot=slot, first=0, count=20),), ids_T=list(ids), history=((),)),
            caches,
        )
    rounds = Rounds(walking, caches, recorder=Recorder())
    asked = [DraftRequest(slot=slot, position=20, token=5 + slot) for slot in (1, 0)]
    rules = [ChoiceRule(temperature=t, top_k=0, top_p=0.9, min_p=0.0, seed=3) for t in (0.0, 1.1)]
    sampler = Sampler(vocab_size=walking.config.vocab_size)

    def pick(number, j, logits_V):
        return sampler.choose(logits_V.float().numpy(), rules[number], 21 + j)

    wanted = walking.draft(asked, caches, pick)
    found = rounds.draft(asked, rules, None)
    assert [r.tokens for r in found] == [r.tokens for r in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-5)
    assert rounds.draft([], [], None) == []


def test_rows_beside_a_prompt_are_chosen_in_the_same_place(model):
    """A request's tokens must not be chosen here or there by what else is in its steps."""
    requests = [request(n, temperature=0.8) for n in range(3)]
    wanted = replies(make_engine(model, None, slots=3, lookup=False), *requests)
    engine = make_engine(model, Recorder(), slots=3, lookup=False)
    rounds, found, eager = engine._runner._rounds, {r.request_id: [] for r in requests}, []
    choose = rounds.choose

    def spy(logits_TV, spans, rules):
        eager.append(all(rule is not None for rule in rules))
        return choose(logits_TV, spans, rules)

    rounds.choose = spy
    for number, asked in enumerate(requests):  # each comes while the one before is decoded
        engine.submit(asked)
        for _ in range(4 if number < 2 else 200):
            for event in engine.step() if engine.has_work else ():
                if isinstance(event, TokenDelta):
                    found[event.request_id] += event.token_ids
                elif isinstance(event, Finished):
                    found[event.request_id].append(event.stats.token_sha)
    assert found == wanted
    assert eager and all(eager)


@pytest.mark.parametrize("changes", [{}, {"logprobs": 1}], ids=str)
def test_recorded_rounds_run_between_the_layers_of_a_prompt(walking, changes):
    """New ones are recorded while it stands there, and passes run ahead of it; no reply changes."""
    requests = [request(n, temperature=0.8, **changes) for n in range(2)]
    longer = replace(requests[0].sampling, max_tokens=60)
    requests[0] = replace(requests[0], sampling=longer)
    wanted = replies(make_engine(walking, None, slots=3, lookup=False), *requests)
    recorder, cut = Recorder(), []
    # where no time passes, no layer fits into a round's share: one runs in each
    engine = make_engine(walking, recorder, clock=lambda: 0.0, slots=3, lookup=False)
    found = {asked.request_id: [] for asked in requests}
    for number, asked in enumerate(requests):
        engine.submit(asked)
        for _ in range(4 if number < 1 else 200):
            before = sum(recorded.replays for recorded in recorder.made)
            for event in engine.step() if engine.has_work else ():
                if isinstance(event, TokenDelta):
                    found[event.request_id] += event.token_ids
                elif isinstance(event, Finished):
                    found[event.request_id].append(event.stats.token_sha)
            if engine._scheduler._begun is not None:
                cut.append(sum(recorded.replays for recorded in recorder.made) - before)
    assert found == wanted
    assert len(cut) > 10 and all(cut)


def test_a_row_without_a_number_fails_its_own_reply_only(model, monkeypatch):
    engine = make_engine(model, Recorder(), slots=2, lookup=False, draft=False)
    rounds = engine._runner._rounds
    decode = model.decode

    def poisoned(round_, caches):
        logits_TV = decode(round_, caches)
        is_bad = (round_.slots_T == 1) & (round_.positions_T > 30)
        return logits_TV.masked_fill(is_bad[:, None], torch.nan)

    monkeypatch.setattr(rounds._model, "decode", poisoned, raising=False)
    events = []
    for number in range(2):
        engine.submit(request(number))
    while engine.has_work:
        events += engine.step()
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["r1"]
    assert "no finite largest value" in failed[0].message
    assert [e.request_id for e in events if isinstance(e, Finished)] == ["r0"]


def test_the_recording_that_was_not_used_for_longest_goes(model, monkeypatch):
    monkeypatch.setattr("twinspark.engine.recording.MOST_RECORDED", 2)
    caches = model.new_caches(4, 64)
    recorder = Recorder()
    rounds = Rounds(model, caches, recorder=recorder)

    def run(slots):
        rounds.run([window(slot, 0, [5]) for slot in range(slots)], [None] * slots)

    for slots in (1, 2, 1, 4, 1, 2):
        run(slots)
    assert len(recorder.made) == 4 and len(rounds.recorded) == 2  # 2 went when 4 came
    rounds.close()
    assert not rounds.recorded


def test_drafts_are_those_of_the_eager_pass(model):
    caches = model.new_caches(2, 64)
    for slot in range(2):
        ids = tiny.prompt(20, salt=slot)
        step = StepInput(
            spans=(Span(slot=slot, first=0, count=20),), ids_T=list(ids), history=((),)
        )
        model.forward(step, caches)
    recorder = Recorder()
    rounds = Rounds(model, caches, recorder=recorder)
    asked = [DraftRequest(slot=slot, position=20, token=5 + slot) for slot in (1, 0)]

    def pick(number, j, logits_V):
        return int(logits_V.argmax())

    for requests in (asked, asked[:1], asked[1:], [asked[0], asked[1], asked[0]]):
        rules = [None] * len(requests)
        assert rounds.draft(requests, rules, pick) == model.draft(requests, caches, pick)
    assert [recorded.replays for recorded in recorder.made] == [1, 2, 1]  # of 2, 1 and 4 requests
    assert rounds.draft([], [], pick) == []


def window(slot, first, ids, **flags):
    return PlannedRows(slot=slot, first=first, ids=tuple(ids), history=(1, 2, 3)[:first], **flags)


def plan(*windows, pieces=()):
    return StepPlan(round=0, windows=windows, pieces=pieces)


def test_what_is_no_round_is_left_to_the_eager_forward(model):
    rounds = Rounds(model, model.new_caches(4, 64), recorder=Recorder())
    row = window(0, 9, [3])
    assert rounds.fits(plan(row, window(1, 9, [3] * 32)))
    assert not rounds.fits(plan(window(0, 9, [3] * 33)))
    assert not rounds.fits(plan(*(window(n, 9, [3] * 30) for n in range(3))))
    assert not rounds.fits(plan(row, pieces=(window(1, 9, [3, 3], prompt_end=11),)))
    assert not rounds.fits(plan(pieces=(window(1, 9, [3, 3], prompt_end=11),)))
    layers = {"pieces": (window(1, 9, [3, 3], prompt_end=11),), "layers": Layers(0, 2)}
    assert rounds.fits(plan(row)._replace(**layers)), "layers of pieces run behind it"
    assert not rounds.fits(plan()._replace(**layers))
    assert not rounds.fits(plan(window(0, 9, [3], is_pruned=True)))
    assert not rounds.fits(plan(window(0, 9, [3], has_bf16_mixing=True)))
    assert not rounds.fits(plan(window(0, 9, [IMAGE])))


def test_contexts_are_buckets_of_twice_the_size(model):
    rounds = Rounds(model, model.new_caches(1, 1024), recorder=Recorder())
    assert rounds._context(5) == 1024  # all there is
    object.__setattr__(rounds._caches.layout, "max_tokens", 1 << 20)
    found = [rounds._context(tokens) for tokens in (1, FIRST_CONTEXT, FIRST_CONTEXT + 1, 9000)]
    assert found == [FIRST_CONTEXT, FIRST_CONTEXT, 2 * FIRST_CONTEXT, 16384]
