"""What the demo's evaluations count: answers, rounds of drafts, calibration; and draft training."""

import time

import numpy as np
import pytest
import torch
from tests.unit.test_demo_long import made_twin
from tools.demo import evaluate, rehearsal
from tools.demo.batches import Batches
from tools.demo.curriculum import Plan
from tools.demo.decode import generate
from tools.demo.draft import draft_greedy
from tools.demo.train_draft import DraftPlan, train_drafts


def test_answers_are_runs_of_targets_around_copied_tokens():
    loss = np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], bool)
    find = np.array([-1, -1, -1, -1, -1, 7, -1, -1, -1])
    assert evaluate.answers(loss, find, copied=True) == [(4, 7)]
    assert evaluate.answers(loss, find, copied=False) == [(1, 3), (4, 7), (8, 9)]
    everything = np.ones(100, bool)  # text around: the copied tokens alone
    copied = np.full(100, -1)
    copied[[20, 21, 50]] = 3
    assert evaluate.answers(everything, copied, copied=True) == [(20, 22), (50, 51)]


def test_scores_are_those_of_the_logits():
    twin = made_twin()
    ids = torch.randint(3, 498, (2, 38), generator=torch.Generator().manual_seed(1))
    loss, right, best = evaluate.token_scores(twin, ids, exact=True)
    logits, _ = twin.logits(ids[:, :-1], exact=True)
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    assert (loss.flatten() - wanted).abs().max() < 1e-9
    assert torch.equal(best, logits.argmax(-1))
    assert torch.equal(right, best == ids[:, 1:])


def test_rounds_jump_over_what_was_accepted():
    accepts = torch.tensor([[0, 2, 5, 0, 1, 0, 0, 0]])  # by position from 1 on
    # from 2: accepts 2, next 5: accepts 1, next 7: none, 8 is the end
    assert evaluate._jump(accepts, torch.tensor([2]), torch.tensor([8])) == (3, 3)


def test_acceptance_equals_a_walk_token_by_token():
    """On the twin's own greedy text, drafts compared one by one with what follows."""
    twin = made_twin()
    prompts = [[0, 5, 6, 7], [0, 9, 300, 20]]
    texts = torch.tensor(generate(twin, prompts, 30))
    texts[1, 20] = 1  # an end
    given = torch.tensor([4, 4])
    found = evaluate.acceptance(twin, texts, given)
    rounds = accepted = 0
    for row, end in ((texts[0].tolist(), 29), (texts[1].tolist(), 20)):
        full = twin.padded(torch.tensor([row]))
        state = twin.start(full)
        twin.hidden(full, state)
        p = 4
        while p < end:
            drafts = draft_greedy(twin, full, torch.tensor([[p]]), state)[0][0].tolist()
            a = 0
            while a < 5 and drafts[a] == row[p + 1 + a]:
                a += 1
            rounds, accepted, p = rounds + 1, accepted + a, p + a + 1
    assert (found["rounds"], found["accepted"]) == (rounds, round(accepted / rounds, 3))
    assert len(found["slots"]) == 5 and found["slots"] == sorted(found["slots"], reverse=True)


def test_needles_are_judged_at_their_longest_and_text_at_its_shortest():
    names = ("code", "needle4k", "needle32k")
    assert evaluate.judged(Plan(), names) == {"code": 2048, "needle4k": 8192, "needle32k": 32768}


def test_calibration_error_is_the_mean_gap():
    sure = torch.tensor([0.95, 0.95, 0.05, 0.05])
    assert evaluate.calibration(sure, torch.tensor([1.0, 1.0, 0.0, 0.0]))[
        "calibration_error"
    ] == pytest.approx(0.05, abs=1e-3)
    assert evaluate.calibration(sure, torch.tensor([0.0, 0.0, 1.0, 1.0]))[
        "calibration_error"
    ] == pytest.approx(0.95, abs=1e-3)
    assert evaluate.calibration(sure[:0], sure[:0]) == {}


def test_a_twin_agrees_with_itself_and_not_with_another(tmp_path):
    rehearsal.write_data(tmp_path, {"chat": (4, 40)})
    plan = Plan(tokens=64, shares=((64, {"chat": 1.0}),), long_from=128)
    held = Batches(tmp_path, "heldout", "cpu", 1)
    twin, other = made_twin(), made_twin()
    twin.params = {n: p.float() for n, p in twin.params.items()}
    other.params = {
        n: p.float().flip(0) if "w2" in n else p.float() for n, p in other.params.items()
    }
    clip = _Clipped(held)
    same = evaluate.compare(twin, twin, clip, plan, 64)["chat"]
    assert same == {"top1_agreement": 1.0, "kl": 0.0}
    differs = evaluate.compare(twin, other, clip, plan, 64)["chat"]
    assert differs["kl"] > 0.05


class _Clipped:
    """Batches with ids inside TINY's vocabulary."""

    def __init__(self, batches):
        self.batches, self.names = batches, batches.names
        self.restore = batches.restore

    def draw(self, *args):
        batch = self.batches.draw(*args)
        return batch._replace(ids=batch.ids % 490)

    def mixed(self, *args):
        batch = self.batches.mixed(*args)
        return batch._replace(ids=batch.ids % 490)


def test_draft_training_lowers_its_loss_on_texts_of_the_backbone(tmp_path):
    rehearsal.write_data(tmp_path, {"chat": (8, 40), "code": (4, 200)})
    data = _Clipped(Batches(tmp_path, "train", "cpu", 1))
    twin = made_twin()
    twin.params = {n: p.float() for n, p in twin.params.items()}
    before = {n: p.clone() for n, p in twin.params.items()}
    plan = DraftPlan(
        length=32, drawn=64, texts=4, continued=4, at_once=4, given=(4, 12), batch=4, starts=6,
        cache_batch=4, shares={"chat": 0.5, "code": 0.5},
    )  # fmt: skip
    said = []
    train_drafts(
        twin, data, plan, time.monotonic(), tmp_path / "drafts.pt",
        lambda kind, **values: said.append((kind, values)), graph=False, steps=51,
    )  # fmt: skip
    losses = [v["loss"] for k, v in said if k == "draft"]
    assert losses[-1] < losses[0] - 0.3
    for name, value in twin.params.items():
        same = torch.equal(value.float(), before[name].bfloat16().float())
        assert same or name.startswith("mtp.") or torch.equal(value, before[name]), name
    assert not torch.equal(twin.params["mtp.0.attn.wq_a.weight"], before["mtp.0.attn.wq_a.weight"])
