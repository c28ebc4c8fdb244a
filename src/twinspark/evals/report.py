"""What a run means: scores by label and in all, wrong examples, and the JSON document of it.

Read next: `plot.py`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from twinspark.errors import ConfigError, EngineDied, TwinSparkError
from twinspark.evals.case import NOT_MEASURABLE
from twinspark.evals.evaluation import Evaluation, Result, Wrong, tokens_a_round
from twinspark.evals.output import write_output
from twinspark.evals.run import Run

KEPT_WRONG = 20
INTERRUPTED = "interrupted"
_LOST = (KeyboardInterrupt, EngineDied, ConfigError)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked, and how.

    Attributes:
        name: of the evaluation.
        model: the pack's or the served one's name.
        kind: whether `place` is a pack's folder or a server's address.
        place: where the model is.
        seed: of the cases.
        thinks: what could be asked without thinking was asked with it.
        skipped: what was left out beforehand, such as lengths over the context, with the reason.
    """

    name: str
    model: str
    kind: Literal["pack", "url"]
    place: str
    seed: int
    thinks: bool = False
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results under one label; `figures` are further columns."""

    label: str
    cases: int
    score: float
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Report:
    """One evaluation of one model.

    Attributes:
        asked: what was asked.
        rows: by label, in the order of the first cases.
        total: over all; None if nothing was measured.
        wanted: cases that were to be asked.
        seconds: the run took.
        tokens: generated or scored.
        tokens_a_round: None where rounds are not known.
        wrong: the first wrong cases with their labels.
        causes: why cases could not be asked, and how many; they count as wrong.
        ended_by: why the run ended early, "" if it did not.
        is_not_measurable: it ended because the subject cannot be measured so at all.
        has_lost_subject: it ended because nothing more can be asked: Ctrl-C, or the subject has
            gone or refuses the key, or something failed that should not.
        fault: what failed that should not; it is to be raised once all is written.
        notes: what a reader of the scores should know.
    """

    asked: Asked
    rows: tuple[Row, ...]
    total: Row | None
    wanted: int
    seconds: float
    tokens: int
    tokens_a_round: float | None
    wrong: tuple[tuple[str, Wrong], ...]
    causes: Mapping[str, int]
    ended_by: str
    is_not_measurable: bool
    has_lost_subject: bool
    fault: BaseException | None = None
    notes: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all cases were finished, and all of them could be asked."""
        return not self.ended_by and not self.causes and self.num_asked > 0

    @property
    def num_asked(self) -> int:
        """Cases that were finished and could be asked."""
        return (self.total.cases if self.total else 0) - sum(self.causes.values())


def make_report(
    asked: Asked, evaluation: Evaluation, run: Run, *, notes: Sequence[str] = ()
) -> Report:
    """Add up a run; `notes` are what a reader of its scores should know."""
    ended_by = run.ended_by
    is_foreseen = ended_by is None or isinstance(ended_by, KeyboardInterrupt | TwinSparkError)
    fault = None if is_foreseen else ended_by
    groups: dict[str, list[Result]] = {}
    for result in run.results:
        groups.setdefault(result.label, []).append(result)
    rows = [_row(label, evaluation, results) for label, results in groups.items()]
    return Report(
        asked=asked,
        rows=tuple(rows),
        total=_row("all", evaluation, run.results) if run.results else None,
        wanted=run.wanted,
        seconds=run.seconds,
        tokens=sum(result.tokens for result in run.results),
        tokens_a_round=tokens_a_round(run.results),
        wrong=tuple((r.label, r.wrong) for r in run.results if r.wrong is not None)[:KEPT_WRONG],
        causes=Counter(result.cause for result in run.results if result.cause),
        ended_by=_reason(run.ended_by),
        is_not_measurable=getattr(run.ended_by, "code", None) == NOT_MEASURABLE,
        has_lost_subject=fault is not None or isinstance(ended_by, _LOST),
        fault=fault,
        notes=tuple(notes),
    )


def _row(label: str, evaluation: Evaluation, results: Sequence[Result]) -> Row:
    return Row(
        label=label,
        cases=len(results),
        score=evaluation.score(results),
        figures=evaluation.figures(results),
    )


def _reason(ended_by: BaseException | None) -> str:
    if ended_by is None:
        return ""
    if isinstance(ended_by, KeyboardInterrupt):
        return INTERRUPTED
    return str(ended_by) if isinstance(ended_by, TwinSparkError) else repr(ended_by)


def document(report: Report, *, version: str, date: str) -> dict[str, Any]:
    """A report as JSON values: name, cases, score, by (label to score), and where they are from.

    Args:
        report: it.
        version: of this program.
        date: of the run, YYYY-MM-DD.
    """
    asked = report.asked
    return {
        "name": asked.name,
        "cases": report.total.cases if report.total else 0,
        "score": report.total.score if report.total else None,
        "by": {row.label: row.score for row in report.rows},
        "complete": report.is_complete,
        "ended_by": report.ended_by or None,
        "wanted": report.wanted,
        "figures": {
            row.label: {"cases": row.cases, **row.figures}
            for row in (*report.rows, *([report.total] if report.total else []))
        },
        "model": asked.model,
        asked.kind: asked.place,
        "seed": asked.seed,
        "thinking": asked.thinks,
        "version": version,
        "date": date,
        "seconds": round(report.seconds, 3),
        "tokens": report.tokens,
        "tokens_a_round": report.tokens_a_round,
        "skipped": list(asked.skipped),
        "notes": list(report.notes),
        "failed": dict(report.causes),
        "wrong": [
            {
                "label": label,
                "prompt_end": wrong.prompt_end,
                "expected": wrong.expected,
                "got": wrong.got,
            }
            for label, wrong in report.wrong
        ],
    }


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is never half of it.

    Raises:
        OSError: it cannot be written.
    """
    write_output(path, orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
