"""Options of `twinspark eval` that are refused before anything is loaded, and its help."""

from pathlib import Path

import pytest

from twinspark.cli.evaluate_output import show_overview, show_report
from twinspark.cli.main import app, run
from twinspark.errors import EngineDied
from twinspark.evals import catalog
from twinspark.evals.catalog import ENTRIES, Options
from twinspark.evals.evaluation import Result, Wrong
from twinspark.evals.report import Asked, make_report
from twinspark.evals.run import Run

GIVEN = "--base-url http://127.0.0.1:1/v1"


def said(command: str, capsys: pytest.CaptureFixture[str], *, code: int = 2) -> str:
    with pytest.raises(SystemExit) as caught:
        run(lambda: app(["eval", *command.split()]))
    assert caught.value.code == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("nedle", "no evaluation 'nedle'; known are "),
        ("text --cases 0", "--cases"),
        ("text --cases many", "--cases"),
        ("text --seed -1", "--seed"),
        ("text --seed 1000000", "--seed"),
        ("text --concurrency 0", "--concurrency"),
        ("text --lengths 1024", "--lengths has no effect on text"),
        ("needle --lengths 1k", "--lengths is '1k'"),
        ("needle --lengths 64", "expected lengths of 512 to"),
        ("sums --thinking", "--thinking has no effect on sums"),
        ("text --plot a.gif", "--plot is a.gif"),
        ("text --plot /nowhere/a.png", "cannot write --plot"),
        ("text --json /nowhere/a.json", "cannot write --json"),
        ("text --model gpt", "give --base-url too"),
        (f"text {GIVEN} --pack demo", "--pack has no effect with --base-url"),
        (f"text {GIVEN} --device cpu", "--device has no effect with --base-url"),
        (f"text {GIVEN} --timeout inf", "--timeout is inf"),
        (f"text {GIVEN} --timeout 1e12", "--timeout is 1e+12"),
        ("text --base-url http://[::1", "expected an address"),
        ("text --json /proc/x.json", "cannot write --json"),
        (f"text {GIVEN}", "is no OpenAI-compatible server"),
        ("text --base-url localhost:8000", "expected an address"),
        ("text --pack /nowhere", "/nowhere"),
        ("text --device gpu", "device"),
    ],
)
def test_what_cannot_be_used_is_refused(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in said(command, capsys)


def test_help_names_every_evaluation_and_teaches_each(capsys: pytest.CaptureFixture[str]) -> None:
    told = said("--help", capsys, code=0)
    assert "--base-url http" in told
    for entry in ENTRIES:
        assert f"\n  {entry.name} " in told
        one = said(f"{entry.name} --help", capsys, code=0)
        assert " ".join(entry.teaches.split()[:4]) in " ".join(one.split())
        assert f"[{entry.cases}]" in one
        assert ("--lengths" in one) == bool(entry.lengths)
        assert ("--thinking" in one) == entry.takes_thinking
    assert "\n  all " in told


def test_a_folder_is_no_file_for_scores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is a folder" in said(f"text --json {tmp_path}", capsys)


def test_texts_of_a_server_reach_the_terminal_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    odd = "a\x1b[2J\r\nb\\"
    asked = Asked(name="sums", model=odd, kind="url", place="p", seed=0)
    results = (
        Result(label="x", score=0.0, wrong=Wrong(prompt_end=odd, expected=odd, got=odd)),
        Result(label="x", score=0.0, cause=odd),
    )
    done = Run(results=results, wanted=3, seconds=1.0, ended_by=EngineDied(odd))
    report = make_report(asked, catalog.find("sums").make(Options()), done)
    show_report(report, verbose=True)
    show_overview([report])
    captured = capsys.readouterr()
    assert "got: a\\x1b[2J\\r\\nb\\\\\n" in captured.out
    assert "could not be asked: a\\x1b[2J\\r\\nb\\\n" in captured.err
    assert not {"\x1b", "\r"} & set(captured.out + captured.err)
