import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinspark.errors import ConfigError
from twinspark.evals.plot import Picture, check_plot, draw, draw_overview
from twinspark.evals.report import Asked, Report, Row

SVG_TEXT = re.compile(r"<text[^>]*>([^<]+)</text>")


def report(*labels: str, name: str = "made up", complete: bool = True, **figures: float) -> Report:
    rows = tuple(
        Row(label=label, cases=5, score=(n + 1) / 4, figures={k: v + n for k, v in figures.items()})
        for n, label in enumerate(labels)
    )
    total = Row(label="all", cases=5 * len(rows), score=0.625, figures=figures)
    return Report(
        asked=Asked(name=name, model="some-model", kind="pack", place="packs/some", seed=42),
        rows=rows,
        total=total,
        wanted=40,
        seconds=1.0,
        tokens=10,
        tokens_a_round=None,
        wrong=(),
        causes={},
        ended_by="" if complete else "gone",
        is_not_measurable=False,
        has_lost_subject=False,
        notes=(),
    )


def texts_of(path: Path) -> list[str]:
    return SVG_TEXT.findall(path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("picture", "given", "shown"),
    [
        ("shares", report("one", "two"), ["one", "two", "25%", "50%", "right"]),
        ("lengths", report("4096", "512"), ["512", "4,096", "tokens of the prompt", "right"]),
        (
            "perplexity", report("code", "prose", perplexity=7.0),
            ["code", "7.0", "8.0", "perplexity (lower is better)"],
        ),
        (
            "effort", report("low", "high", tokens=100.0),
            ["low", "100", "101", "tokens a case", "right", "reasoning effort"],
        ),
        (
            "rounds", report("code", **{"tokens a round": 2.5}),
            ["code", "2.50", "tokens a round (1 without drafts)"],
        ),
    ],
)  # fmt: skip
def test_pictures_say_what_they_show(
    picture: Picture, given: Report, shown: list[str], tmp_path: Path
) -> None:
    draw(given, picture, tmp_path / "a.svg")
    found = texts_of(tmp_path / "a.svg")
    assert set(shown) <= set(found)
    assert "made up: some-model, score 0.625" in found
    assert f"n = {5 * len(given.rows)}, seed 42, packs/some" in found


def test_a_picture_says_that_it_is_incomplete(tmp_path: Path) -> None:
    draw(report("one", complete=False), "shares", tmp_path / "a.svg")
    assert "n = 5 of 40, incomplete, seed 42, packs/some" in texts_of(tmp_path / "a.svg")


def test_the_overview_has_every_evaluation(tmp_path: Path) -> None:
    both = [report("x", name="sums"), report("y", "z", name="json", complete=False)]
    draw_overview(both, tmp_path / "a.svg")
    found = texts_of(tmp_path / "a.svg")
    assert {"sums", "n = 5", "json", "n = 10", "score"} <= set(found)
    assert "seed 42, some incomplete, packs/some" in found


@pytest.mark.parametrize(
    ("ending", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml")]
)
def test_kinds_of_files(ending: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    check_plot(path)
    draw(report("one"), "shares", path)
    assert path.read_bytes().startswith(magic)


def test_other_endings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.gif.*\.png, \.svg, \.pdf"):
        check_plot(Path("a.gif"))


def test_without_matplotlib_it_says_what_to_install_before_the_run() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from twinspark.cli.main import run, app\n"
        "run(lambda: app(['eval', 'text', '--plot', 'a.png', '--pack', '/nowhere']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'twinspark[plot]'" in done.stderr and "/nowhere" not in done.stderr
