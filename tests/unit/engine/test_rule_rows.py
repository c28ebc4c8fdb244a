"""Rules written in place are those that are made anew, and only rows that change are written."""

import torch

from twinspark.cache.staging import Staging
from twinspark.engine.rule_rows import RuleRows
from twinspark.engine.sampler import ChoiceRule
from twinspark.kernels.head import RowRules

A = ChoiceRule(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=(1 << 64) - 3, choice_index=2)
B = ChoiceRule(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, seed=1 << 31)
GREEDY = ChoiceRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
SIZE = 8


def new_rows():
    staging = Staging(64 * SIZE, torch.device("cpu"))
    fields = staging.cut()
    return RuleRows(fields, SIZE), staging.part(0, fields.end)


def made(rules):
    return RowRules.of(
        temperature=[r.temperature for r in rules],
        top_k=[r.top_k for r in rules],
        top_p=[r.top_p for r in rules],
        min_p=[r.min_p for r in rules],
        seed=[r.seed for r in rules],
        position=list(range(len(rules))),
        choice=[r.choice_index for r in rules],
    )


def test_rows_hold_the_numbers_of_their_rules_and_the_rest_what_it_held():
    rows, part = new_rows()
    for ruled, wanted in (
        ([(A, 2), (None, 1), (B, 3)], [A, A, GREEDY, B, B, B, GREEDY, GREEDY]),
        ([(B, 1)], [B, A, GREEDY, B, B, B, GREEDY, GREEDY]),
        ([(B, 1), (A, 7)], [B] + [A] * 7),
        ([(None, 8)], [GREEDY] * 8),
        ([], [GREEDY] * 8),
    ):
        rows.write(ruled)
        part.bring()
        found = rows.rules(SIZE, torch.arange(SIZE, dtype=torch.int32))
        for ours, theirs in zip(found.tensors(), made(wanted).tensors(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert all(len(t) == 3 for t in rows.rules(3, torch.zeros(3)).tensors())


def test_rules_are_written_only_when_they_change():
    rows, _ = new_rows()
    same = ChoiceRule(**vars(A))
    for ruled in ([(A, 2), (B, 1)], [(A, 2), (B, 1)], [(same, 2), (B, 1)]):
        rows.write(ruled)
    assert rows.writes == 1
    rows.write([(A, 1), (B, 1)])  # a window has become shorter
    assert rows.writes == 2
    rows.write([(A, 1)])
    rows.write([(A, 1), (B, 1)])  # and is as long as it was
    assert rows.writes == 2
    rows.write([(B, 1), (A, 1)])
    assert rows.writes == 3


def test_greedy_rules_are_one_whoever_asks():
    rows, _ = new_rows()
    greedy = [ChoiceRule(**{**vars(B), "temperature": 0.0, "seed": seed}) for seed in (1, 2)]
    rows.write([(greedy[0], 3), (greedy[1], 2)])
    rows.write([(greedy[1], 1), (None, 4), (greedy[0], 1)])
    assert rows.writes == 0
