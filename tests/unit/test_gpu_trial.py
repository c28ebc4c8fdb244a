"""Steps of a trial on a GPU: each ends for itself, and what became of it is written down."""

import json
import sys

import pytest
from tools import gpu_trial
from tools.gpu_trial import Step, Trial, steps


def step(name, code, *, limit_s=20, dry="pass", alone=True):
    return Step(name, "group", ("-c", code), limit_s, ("-c", dry), alone)


def written(out):
    document = json.loads((out / "trial.json").read_text())
    return {one["name"]: (one["state"], one["note"]) for one in document["steps"]}


def test_a_step_that_fails_or_hangs_costs_the_others_nothing(tmp_path):
    hangs = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('wrote what there was'), sys.exit(0)))\n"
        "print('began', flush=True)\ntime.sleep(60)"
    )
    chosen = [
        step("shared", "print('2 passed')", alone=False),
        step("fails", "print('why'); raise SystemExit(3)"),
        step("hangs", hangs, limit_s=2),
        step("follows", "print('all well')"),
    ]
    trial = Trial(tmp_path / "new" / "out", budget_s=60, dry=False)
    assert not trial.run(chosen, jobs=2)
    found = written(tmp_path / "new" / "out")
    assert [state for state, _ in found.values()] == ["ok", "failed", "out of time", "ok"]
    assert "exit code 3" in found["fails"][1] and "why" in found["fails"][1]
    assert "wrote what there was" in found["hangs"][1]  # it was asked before it was ended
    assert found["follows"][1] == "all well"


def test_nothing_is_started_when_the_budget_is_spent(tmp_path):
    trial = Trial(tmp_path, budget_s=0, dry=False)
    assert not trial.run([step("late", "print('no')")], jobs=1)
    assert written(tmp_path)["late"] == ("not started", "the budget is spent: run it with --only")
    assert not (tmp_path / "late.log").exists()


def test_a_dry_trial_runs_what_needs_no_device(tmp_path):
    trial = Trial(tmp_path, budget_s=60, dry=True)
    assert trial.run([step("x", "raise SystemExit(1)", dry="print('would run')")], jobs=1)
    assert written(tmp_path)["x"] == ("ok", "would run")


def test_every_gpu_test_file_is_in_the_trial(tmp_path):
    named = {argument for one in steps(tmp_path) for argument in one.command}
    folder = gpu_trial.ROOT / "tests" / "kernels"
    marked = [path for path in sorted(folder.glob("test_*.py")) if "mark.gpu" in path.read_text()]
    assert marked and {str(path.relative_to(gpu_trial.ROOT)) for path in marked} <= named
    for path in (gpu_trial.ROOT / name for name in named if name.startswith("tests/")):
        files = [path] if path.is_file() else sorted(path.glob("test_*.py"))
        assert any("mark.gpu" in file.read_text() for file in files), f"{path} has none for a GPU"
    assert "tests/gpu" in named and len({one.name for one in steps(tmp_path)}) == len(
        steps(tmp_path)
    )


@pytest.mark.parametrize("arguments, said", [
    (["--only", "nope"], "--only is 'nope', expected some of"),
    (["--only", ","], "expected some of"),
])  # fmt: skip
def test_bad_arguments_are_told(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_trial.py", *arguments])
    with pytest.raises(SystemExit):
        gpu_trial.main()
    assert said in capsys.readouterr().err


def test_a_machine_without_a_device_is_told_of_dry_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_trial, "why_no_device", lambda: "no device here")
    monkeypatch.setattr(sys, "argv", ["gpu_trial.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu_trial.main()
    assert "no device here; --dry looks at every step" in capsys.readouterr().err
