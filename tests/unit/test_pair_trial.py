"""The trial of a machine with two GPUs, without the machine: limits, figures, a plain account."""

import json
import sys
from dataclasses import replace

import pytest
from tools.pair_trial import STEPS, Step, main, run_trial


def step(name, code, **fields):
    return Step(name=name, command=(sys.executable, "-c", code), limit_s=30, **fields)


def test_a_step_that_fails_or_hangs_does_not_hold_up_the_others(tmp_path, capsys):
    steps = [
        step("wrong", "import sys; print('why'); sys.exit(3)"),
        replace(step("hangs", "import time; print('on', flush=True); time.sleep(60)"), limit_s=2),
        Step(name="absent", command=("/no-such-program",), limit_s=5),
        step("well", "print('{out}')"),
    ]
    found = run_trial(steps, tmp_path, 100)["steps"]
    assert found["wrong"]["ended"] == "exit code 3" and found["wrong"]["tail"] == ["why"]
    assert found["hangs"]["ended"] == "out of time after 2 s" and found["hangs"]["tail"] == ["on"]
    assert found["hangs"]["seconds"] < 15
    assert "cannot be started" in found["absent"]["ended"]
    assert found["well"]["ended"] == "ok" and found["well"]["tail"] == [str(tmp_path)]
    assert json.loads((tmp_path / "trial.json").read_text())["steps"] == found
    assert "exit code 3" in capsys.readouterr().out


def test_figures_are_taken_in(tmp_path):
    lines = "import os; f = open(os.environ['WHERE'], 'a'); f.write('{\"a\": 1}\\n{\"a\": 2}\\n')"
    steps = [
        step("one", "open('{out}/a.json', 'w').write('[4]')", figures="a.json"),
        step("lines", lines, figures="b.jsonl", environment={"WHERE": "{out}/b.jsonl"}),
        step("none", "", figures="c.json"),
    ]
    found = run_trial(steps, tmp_path, 100)["steps"]
    assert found["one"]["figures"] == [4]
    assert found["lines"]["figures"] == [{"a": 1}, {"a": 2}]
    assert found["none"]["figures"] is None


def test_what_there_is_no_time_for_is_said(tmp_path):
    found = run_trial([step("late", "print(1)")], tmp_path, 1)["steps"]
    assert found["late"]["ended"] == "not begun: the time is over"


def test_a_dry_run_names_every_step_and_runs_none(tmp_path, capsys):
    assert main([str(tmp_path / "none"), "--dry"]) == 0
    said = capsys.readouterr().out
    assert all(step.name in said for step in STEPS) and not (tmp_path / "none").exists()
    assert f"{tmp_path}/none/pair.json" in said
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--only", "weather"])
    assert "no step 'weather'" in capsys.readouterr().err
