"""Tables of a training: figures stand where they belong, and what was not measured is no table."""

import json
import math

import pytest
from tools.demo import tables

from twinspark.evals.evaluation import Result
from twinspark.evals.judged import Judged
from twinspark.evals.tasks.json_schema import JsonSchema

WHOLE = {
    "code": {"loss": 2.0, "top1": 0.5},
    "needle4k": {"loss": 0.5, "top1": 0.9, "right": 0.75, "answers": 8},
    "needle32k": {"left_out": "too little text"},
}
PACK = {
    "code": {"loss": 2.0 + math.log(1.25), "top1": 0.4},
    "needle4k": {"loss": 0.5, "top1": 0.9, "right": 0.625, "answers": 8},
}
RESULTS = {
    "ablations": {
        "whole": WHOLE,
        "engram": {
            "code": {"loss": 2.5, "top1": 0.4},
            "needle4k": {"loss": 0.4375, "top1": 0.9, "right": 0.875, "answers": 8},
        },
    },
    "pack-3": {"bytes": 1234567, "fits": True, "body_bits": 3.0, "seconds": 4.56, "report": {}},
    "retention-3": {
        "agreement": {"code": {"top1_agreement": 0.8125, "kl": 0.0625}},
        "heldout": PACK,
    },
    "retention-mix": {"agreement": {"code": {"top1_agreement": 0.9375, "kl": 0.03125}}},
    "drafts": {
        "code": {
            "rounds": 40, "accepted": 1.5, "tokens_a_round": 2.5, "slots": [0.75, 0.5],
            "calibration_error": 0.0625, "mean_confidence": 0.5, "mean_right": 0.625,
        }
    },
}  # fmt: skip


def cells(table, name):
    """The cells of a row by the heads of their columns."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    (row,) = [row for row in rows if row[0] == name]
    return dict(zip(head[1:], row[1:], strict=False))


def test_held_out():
    table = tables.heldout_table(RESULTS)
    assert cells(table, "needle4k") == {
        "nats a token": "0.500", "right tokens": "90.0 %", "right answers": "75.0 %", "of": "8",
    }  # fmt: skip
    assert cells(table, "needle32k")["nats a token"] == "too little text"


def test_ablations_tell_what_is_lost():
    losses, answers = tables.ablation_tables(RESULTS)
    assert cells(losses, "code") == {"whole": "2.000", "no Engram": "+0.500"}
    assert cells(losses, "needle4k") == {"whole": "0.500", "no Engram": "-0.062"}
    assert cells(answers, "needle4k") == {"whole": "75.0 %", "no Engram": "87.5 %"}
    assert "needle32k" not in losses + answers and "code" not in answers


def test_retention_by_width():
    packs, agreement, kl, ratio, right = tables.retention_tables(RESULTS)
    assert cells(packs, "3")["bytes"] == "1,234,567"
    assert cells(agreement, "code") == {"3 bits": "81.2 %", "mix": "93.8 %"}
    assert cells(kl, "code") == {"3 bits": "0.062", "mix": "0.031"}
    assert cells(ratio, "code") == {"3 bits": "x1.250"}
    assert cells(right, "needle4k") == {"checkpoint": "75.0 %", "3 bits": "62.5 %"}
    assert tables.widths_of({"pack-mix": 0, "pack-2": 0, "retention-6": 0}) == ["6", "2", "mix"]


def test_drafts():
    found = cells(tables.drafts_table(RESULTS), "code")
    assert (found["tokens a round"], found["right by slot, %"]) == ("2.50", "75 / 50")


def written(path, name, right, cases=4, *, complete=True):
    figures = {"cases": cases, "right": float(right), "tokens": 99.5, "tokens a round": 2.5}
    document = {
        "name": name, "score": right / cases, "by": {"4096": right / cases}, "complete": complete,
        "figures": {"4096": figures, "all": figures},
    }  # fmt: skip
    path.write_text(json.dumps([document, document] if complete else document))
    return path


def test_skills_by_subject(tmp_path):
    first = written(tmp_path / "a.json", "needle", 1)
    again = written(tmp_path / "b.json", "needle", 3)
    cut = written(tmp_path / "c.json", "needle", 2, complete=False)
    evals = tables.read_evals([f"4={first}", f"4={again}", f"2={cut}"])
    scores, rounds = tables.skill_tables(evals)
    wanted = {"4": "75.0 % of 4", "2": "50.0 % of 4 (not complete)"}
    assert cells(scores, "needle: 4096") == cells(scores, "needle: all") == wanted
    assert cells(rounds, "needle: all") == {"4": "2.50", "2": "2.50 (not complete)"}


def test_of_json_the_valid_ones_stand_beside_the_right_ones(tmp_path):
    """Its score is the valid ones: 1.000 may be shown as nothing but "right 0.0 %" never."""
    figures = Judged(JsonSchema()).figures(
        [Result(label="grammar", score=1.0, sums={"right": 0.0})] * 4
    )
    document = {"name": "json", "by": {"grammar": 1.0}, "complete": True}
    path = tmp_path / "json.json"
    path.write_text(json.dumps(document | {"figures": {"grammar": {"cases": 4} | figures}}))
    sums = written(tmp_path / "sums.json", "sums", 3)
    valid, right, *_ = tables.skill_tables(tables.read_evals([f"mix={path}", f"mix={sums}"]))
    assert cells(valid, "json: grammar") == {"mix": "100.0 % of 4"}
    assert cells(right, "json: grammar") == {"mix": "0.0 % of 4"}
    assert "sums" not in valid and cells(right, "sums: all") == {"mix": "75.0 % of 4"}


def test_of_no_cases_there_is_no_share():
    document = {"name": "json", "by": {}, "complete": False}
    figures = {"all": {"cases": 0, "valid": 0.0, "right": 0.0}}
    found = tables.skill_tables({"mix": {"json": document | {"figures": figures}}})
    assert [cells(t, "json: all") for t in found] == [{"mix": "no cases (not complete)"}] * 2


def test_tokens_are_shown_of_efforts_and_perplexities_of_texts(tmp_path):
    text = {"name": "text", "by": {}, "complete": True, "figures": {"code": {"perplexity": 70.25}}}
    (tmp_path / "text.json").write_text(json.dumps(text))
    effort = written(tmp_path / "effort.json", "effort", 1)
    evals = tables.read_evals([f"mix={effort}", f"3={tmp_path / 'text.json'}"])
    right, tokens, rounds, perplexity = tables.skill_tables(evals)
    assert cells(tokens, "effort: 4096") == {"mix": "99.5"}
    assert cells(perplexity, "text: code") == {"3": "70.25"}
    assert "text" not in right + tokens + rounds


def test_what_is_given_wrongly_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"expected SUBJECT=FILE\.json, got 'x\.json'"):
        tables.read_evals(["x.json"])
    (tmp_path / "x.json").write_text("[3]")
    with pytest.raises(ValueError, match="expected what `twinspark eval --json` writes"):
        tables.read_evals([f"a={tmp_path / 'x.json'}"])


def test_what_was_not_measured_is_no_table(tmp_path, capsys, monkeypatch):
    assert tables.page({}, {}) == "\n"
    assert "## Drafts" not in tables.page({"ablations": {"whole": WHOLE}}, {})
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RESULTS))
    evals = f"mix={written(tmp_path / 'a.json', 'sums', 2)}"
    monkeypatch.setattr("sys.argv", ["tables", str(path), "--evals", evals])
    tables.main()
    said = capsys.readouterr().out
    headings = [line for line in said.splitlines() if line.startswith("## ")]
    assert headings == [
        "## What it learned", "## What each part earns", "## What packs keep", "## Drafts",
        "## Skills",
    ]  # fmt: skip
    assert "| sums: all | 50.0 % of 4 |" in said
