"""Named approximations are pure functions of the request, and leave other requests alone.

Expert pruning needs more than three experts a token to act, so it runs on TINY with top-6 of 8.
"""

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tiny
from tests.unit.model.harness import Session, prompt, tiny_token_map
from tests.unit.model.span_steps import Part, Plan, Truth, alone, run, together

from twinspark.kernels.matmul import prepare_matrix
from twinspark.model import moe
from twinspark.model.experts import ExpertBank
from twinspark.model.loading import load_model
from twinspark.model.step import Span, StepInput

LENGTH = 72
REPLY = 5
PRUNED = {"decode": {"is_pruned": True}}
BF16 = {"both": {"has_bf16_mixing": True}}
REPLAY = {"mode": "replay"}
COMBINATIONS = [
    {key: value for chosen in combination for key, value in chosen.items()}
    for combination in product(({}, PRUNED), ({}, BF16), ({}, REPLAY))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("top6") / "pack"
    document = dict(
        tiny.CONFIG, text_config=dict(tiny.CONFIG["text_config"], num_experts_per_tok=6)
    )
    tiny.write_exl3(path, document=document)
    return load_model(path, token_map=tiny_token_map())


@pytest.fixture(scope="module")
def ids():
    return prompt(LENGTH, salt=8)


@pytest.fixture(scope="module")
def exact(model, ids):
    return Truth(model, ids)


@pytest.fixture(scope="module")
def serial(model, ids):
    """Windows of every combination after a whole prompt, one row a window, alone."""
    found = {}

    def get(prompt_tokens, number):
        key = (prompt_tokens, number)
        if key not in found:
            plan = Plan(
                0, ids[: prompt_tokens + REPLY], prompt_tokens, (), (200,), **COMBINATIONS[number]
            )
            session, logits = Session(model, max_tokens=LENGTH + 8), []
            for part in plan.parts():
                rows = [part]
                if part.prompt_end is None:
                    rows = [Part(0, [token], part.span) for token in part.ids]
                logits += [run(session, [row])[0] for row in rows]
            found[key] = torch.cat(logits[-REPLY - 1 :])
        return found[key]

    return get


def test_each_combination_is_a_function_of_its_own(exact, serial):
    """All eight differ from one another; the empty one is exact."""
    found = [serial(50, number) for number in range(len(COMBINATIONS))]
    assert torch.equal(found[0], exact.logits[49 : 50 + REPLY])
    for one, other in product(range(8), range(8)):
        assert torch.equal(found[one], found[other]) == (one == other)


@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_batched_in_pieces_and_drafted_equals_serial(model, ids, serial, data):
    """Three requests under any approximations, any pieces and windows, beside one another."""
    session = Session(model, max_tokens=LENGTH + 8, slots=3)
    plans, wanted = [], []
    for slot in range(3):
        prompt_tokens = data.draw(st.sampled_from([1, 31]), label="prompt")
        number = data.draw(st.integers(0, 7), label="approximations")
        sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3), label="sizes")
        more = COMBINATIONS[number]
        plans.append(Plan(slot, ids[: prompt_tokens + REPLY], prompt_tokens, (), sizes, **more))
        wanted.append(serial(prompt_tokens, number))
    found = {slot: [] for slot in range(3)}
    turns = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6), label="turns")
    for part, logits in together(session, plans, cycle(turns)):
        if part.prompt_end is None:
            found[part.slot].append(logits)
    for slot in range(3):
        assert torch.equal(torch.cat(found[slot]), wanted[slot])


def test_rejected_pruned_rows_leave_nothing_behind(model, ids, serial):
    """Rollback under all three together."""
    plan = Plan(0, ids[:50], 50, (), (200,), **COMBINATIONS[-1])
    session = Session(model, max_tokens=LENGTH + 8)
    *pieces, window = plan.parts()
    for part in pieces:
        run(session, [part])
    found = []
    for first in range(49, 50 + REPLY, 3):
        wrong = Part(0, [*ids[first : first + 1], 3, 4, 5, 6, 7], window.span)
        run(session, [wrong])
        session.rewind(first)
        found.append(
            run(session, [Part(0, ids[first : min(first + 3, 50 + REPLY)], window.span)])[0]
        )
    assert torch.equal(torch.cat(found), serial(50, len(COMBINATIONS) - 1))


def test_bf16_mixing_is_a_model_with_rounded_weights(model, ids, monkeypatch):
    """In every site of every backbone layer, prompt and decode rows alike; drafts are as ever."""
    plan = Plan(0, ids, 40, (), (30, 5), **BF16)
    found = alone(model, plan)
    sites = [(layer, name) for layer in model._layers for name in ("_attn_site", "_ffn_site")]
    for layer, name in sites:
        site = getattr(layer, name)
        weight = torch.cat(site.fn.chunks)[:, : site.fn.out_features].T
        monkeypatch.setattr(layer, name, replace(site, fn=prepare_matrix(weight.bfloat16())))
    assert torch.equal(alone(model, replace(plan, both={})), found)
    assert len(sites) == 2 * model.config.num_hidden_layers


class Unusable:
    """Weights that nobody may look at."""

    def __getattr__(self, name):
        raise AssertionError("read without a flagged row")


def test_exact_requests_do_no_work_for_approximations(model, ids, exact, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("called without a flagged row")

    monkeypatch.setattr(moe, "prune", fail)
    for layer in model._layers:
        for name in ("_attn_site", "_ffn_site"):
            monkeypatch.setattr(layer, name, replace(getattr(layer, name), fn_bf16=Unusable()))
    found = alone(model, Plan(0, ids, 60, (), (40,)))
    assert torch.equal(found, exact.logits[59:])


def test_dropped_experts_are_not_run(model, ids, monkeypatch):
    """Each row runs three to six experts and the shared one; a neighbor that is exact all seven."""
    rows, call = [], ExpertBank.__call__

    def count(bank, x, ids_P):
        rows.append(len(ids_P))
        return call(bank, x, ids_P)

    monkeypatch.setattr(ExpertBank, "__call__", count)
    session = Session(model, slots=2)
    run(session, [Part(0, ids[:6], {"is_pruned": True}), Part(1, ids[:2])])
    per_layer = rows[1::2]  # the second bank of a layer is w2
    assert len(per_layer) == model.config.num_hidden_layers
    assert all(6 * 4 + 2 * 7 <= pairs <= 8 * 7 for pairs in per_layer)
    assert sum(per_layer) < 8 * 7 * len(per_layer)


def test_prompt_rows_are_never_pruned(model):
    session = Session(model)
    span = Span(slot=0, first=0, count=1, prompt_end=4, is_pruned=True)
    with pytest.raises(AssertionError, match="prompt rows are never pruned"):
        model.forward(StepInput(spans=(span,), ids_T=[3], history=((),)), session.caches)
