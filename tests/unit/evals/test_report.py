import json
import os
from pathlib import Path

import pytest
from tests.scripted_subject import Doubles

from twinspark.errors import ConfigError, EngineDied, RequestError
from twinspark.evals.case import NOT_MEASURABLE
from twinspark.evals.evaluation import Result, Wrong
from twinspark.evals.judged import Judged
from twinspark.evals.report import (
    INTERRUPTED,
    KEPT_WRONG,
    Asked,
    Report,
    document,
    make_report,
    write_json,
)
from twinspark.evals.run import Run

ASKED = Asked(name="doubles", model="m", kind="url", place="http://h/v1", seed=7, skipped=("x",))
WRONG = Wrong(prompt_end="double 3", expected="6", got="7")
RESULTS = (
    Result(label="even", score=1.0, tokens=10, rounds=4),
    Result(label="odd", score=0.0, tokens=20, rounds=8, wrong=WRONG),
    Result(label="even", score=1.0, tokens=30, rounds=8),
    Result(label="odd", score=0.0, cause="too long"),
)


def report_of(*results: Result, ended_by: BaseException | None = None) -> Report:
    run = Run(results=results, wanted=4, seconds=1.23456, ended_by=ended_by)
    return make_report(ASKED, Judged(Doubles()), run, notes=["tokens are estimated"])


def test_the_document_of_a_whole_run() -> None:
    found = document(report_of(*RESULTS), version="1.2", date="2026-12-01")
    assert json.loads(json.dumps(found)) == {
        "name": "doubles",
        "cases": 4,
        "score": 0.5,
        "by": {"even": 1.0, "odd": 0.0},
        "complete": False,
        "ended_by": None,
        "wanted": 4,
        "figures": {
            "even": {"cases": 2, "right": 2.0, "tokens": 20.0, "tokens a round": 40 / 12},
            "odd": {"cases": 2, "right": 0.0, "tokens": 20.0, "tokens a round": 2.5},
            "all": {"cases": 4, "right": 2.0, "tokens": 20.0, "tokens a round": 3.0},
        },
        "model": "m",
        "url": "http://h/v1",
        "seed": 7,
        "thinking": False,
        "version": "1.2",
        "date": "2026-12-01",
        "seconds": 1.235,
        "tokens": 60,
        "tokens_a_round": 3.0,
        "skipped": ["x"],
        "notes": ["tokens are estimated"],
        "failed": {"too long": 1},
        "wrong": [
            {"label": "odd", "prompt_end": "double 3", "expected": "6", "got": "7"},
        ],
    }


@pytest.mark.parametrize(
    ("ended_by", "said", "is_lost", "is_not_measurable"),
    [
        (KeyboardInterrupt(), INTERRUPTED, True, False),
        (EngineDied("gone"), "gone", True, False),
        (ConfigError("key"), "key", True, False),
        (RequestError("no echo", code=NOT_MEASURABLE), "no echo", False, True),
        (RequestError("refused"), "refused", False, False),
        (ZeroDivisionError("ours"), "ZeroDivisionError('ours')", True, False),
    ],
)
def test_a_run_that_ended_early(
    ended_by: BaseException, said: str, is_lost: bool, is_not_measurable: bool
) -> None:
    report = report_of(*RESULTS[:2], ended_by=ended_by)
    assert not report.is_complete
    assert (report.ended_by, report.has_lost_subject) == (said, is_lost)
    assert report.is_not_measurable == is_not_measurable
    assert report.fault == (ended_by if isinstance(ended_by, ZeroDivisionError) else None)
    found = document(report, version="1", date="d")
    assert (found["complete"], found["cases"], found["score"]) == (False, 2, 0.5)


def test_a_run_without_a_result_has_no_score() -> None:
    found = document(report_of(ended_by=KeyboardInterrupt()), version="1", date="d")
    assert (found["score"], found["by"], found["cases"]) == (None, {}, 0)


def test_where_a_case_could_not_be_asked_the_run_is_not_complete() -> None:
    refused = Result(label="odd", score=0.0, cause="no")
    assert not report_of(refused, refused).is_complete
    assert not report_of(refused, RESULTS[1]).is_complete
    assert report_of(RESULTS[1]).is_complete


def test_only_the_first_wrong_cases_are_kept() -> None:
    wrong = [
        Result(label="odd", score=0.0, wrong=Wrong(prompt_end=str(n), expected="", got=""))
        for n in range(KEPT_WRONG + 5)
    ]
    kept = report_of(*wrong).wrong
    assert [one.prompt_end for _, one in kept] == [str(n) for n in range(KEPT_WRONG)]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})
    first = path.stat().st_ino
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert path.stat().st_ino != first
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}
    assert os.listdir(tmp_path) == ["out.json"]
