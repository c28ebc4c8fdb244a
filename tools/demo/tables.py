"""Markdown tables for docs/demo-model.md out of what a training measured.

    python -m tools.demo.tables RESULTS.json [--evals SUBJECT=FILE.json ...]

RESULTS.json is what `expedition.py` carried away. FILE.json is what `twinspark eval NAME --pack
PACK --json FILE.json` wrote (of one evaluation or of `all`); SUBJECT heads its column, and several
files of one subject are joined. What was not measured has no table, no column or an empty cell.
Read next: `expedition.py`, `evaluate.py`.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Values = Mapping[str, Any]
OFF = {
    "whole": "whole",
    "engram": "no Engram",
    "newest": "newest rows",
    "random": "random rows",
    "candidates": "no candidates",
}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its first column holds names."""
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(value: float | None) -> str:
    """0 to 1 in percent."""
    return "" if value is None else f"{100 * value:.1f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


COUNTED = ("valid", "right")  # numbers of cases; of JSON the score is valid, of all others right
# Of an evaluation: title, figure, the only one it is shown of, form.
FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("valid", "valid", "", str),
    ("right", "right", "", str),
    ("mean tokens a reply", "tokens", "effort", lambda value: number(value, 1)),
    ("tokens a round", "tokens a round", "", lambda value: number(value, 2)),
    ("perplexity", "perplexity", "", lambda value: number(value, 2)),
    ("bits a byte", "bits a byte", "", number),
)


def sources(*found: Values) -> list[str]:
    """Names of the sources that any of the results has, in their order."""
    return list(dict.fromkeys(name for one in found for name in one))


def heldout_table(results: Values) -> str:
    """Loss, right tokens and right answers of the checkpoint, by source."""
    whole = results.get("ablations", {}).get("whole")
    if not whole:
        return ""
    rows = []
    for name, found in whole.items():
        if "left_out" in found:
            rows.append([name, found["left_out"], "", "", ""])
            continue
        answers = str(found.get("answers", ""))
        rows.append(
            [name, number(found["loss"]), share(found["top1"]), share(found.get("right")), answers]
        )
    return markdown(["held out", "nats a token", "right tokens", "right answers", "of"], rows)


def ablation_tables(results: Values) -> list[str]:
    """What each part earns: loss, and right answers, with it switched off."""
    found = results.get("ablations", {})
    kinds = [kind for kind in OFF if kind in found]
    if kinds[:1] != ["whole"]:
        return []
    names = sources(*(found[kind] for kind in kinds))
    losses, answers = [], []
    for name in names:
        cells = {kind: found[kind].get(name, {}) for kind in kinds}
        base = cells["whole"].get("loss")
        if base is not None:
            row = [_more(cells[k].get("loss"), base) for k in kinds[1:]]
            losses.append([name, number(base), *row])
        if cells["whole"].get("right") is not None:
            answers.append([name, *(share(cells[k].get("right")) for k in kinds)])
    heads = [OFF[kind] for kind in kinds]
    tables = [markdown(["loss, nats a token", *heads], losses)] if losses else []
    return tables + ([markdown(["right answers", *heads], answers)] if answers else [])


def _more(value: float | None, base: float) -> str:
    return "" if value is None else f"{value - base:+.3f}"


def widths_of(results: Values) -> list[str]:
    """Widths of packs that something is known of: from many bits to few, mixed ones last."""
    kinds = ("pack-", "retention-")
    found = {n.removeprefix(k) for n in results for k in kinds if n.startswith(k)}
    return sorted(found, key=lambda w: (not w.isdigit(), -int(w) if w.isdigit() else 0, w))


def retention_tables(results: Values) -> list[str]:
    """What packs of each width kept of the checkpoint."""
    widths = widths_of(results)
    kept = {w: results.get(f"retention-{w}", {}) for w in widths}
    agreement = {w: kept[w].get("agreement", {}) for w in widths}
    heldout = {w: kept[w].get("heldout", {}) for w in widths}
    whole = results.get("ablations", {}).get("whole", {})
    tables = [_packs(results, widths)] if any(f"pack-{w}" in results for w in widths) else []
    for title, field, form in (
        ("top-1 agreement", "top1_agreement", share),
        ("KL, nats a token", "kl", number),
    ):
        cells = {w: {n: v.get(field) for n, v in agreement[w].items()} for w in widths}
        tables.append(_by_width(title, cells, form))
    ratios = {w: {n: _ratio(v, whole.get(n, {})) for n, v in heldout[w].items()} for w in widths}
    tables.append(_by_width("perplexity against the checkpoint", ratios, _times))
    right = {"checkpoint": whole} | heldout
    cells = {w: {n: v.get("right") for n, v in found.items()} for w, found in right.items()}
    tables.append(_by_width("right answers", cells, share) if any(heldout.values()) else "")
    return [table for table in tables if table]


def _packs(results: Values, widths: Sequence[str]) -> str:
    rows = []
    for width in widths:
        made = results.get(f"pack-{width}")
        if made:
            report = made.get("report", {})
            rows.append(
                [width, f"{made['bytes']:,}", number(made["body_bits"], 2),
                 f"{report['worst_proxy_error']:.1e}" if "worst_proxy_error" in report else "",
                 number(made["seconds"], 1)]
            )  # fmt: skip
    head = ["pack", "bytes", "bits a weight of the backbone", "worst matrix error", "seconds"]
    return markdown(head, rows)


def _ratio(pack: Values, checkpoint: Values) -> float | None:
    if "loss" not in pack or "loss" not in checkpoint:
        return None
    return math.exp(pack["loss"] - checkpoint["loss"])


def _times(value: float | None) -> str:
    return "" if value is None else f"x{value:.3f}"


def _by_width(title: str, cells: Mapping[str, Mapping[str, float | None]], form: Any) -> str:
    """Sources down, widths across; nothing if there is no value at all."""
    columns = [w for w in cells if any(v is not None for v in cells[w].values())]
    names = [
        n for n in sources(*cells.values()) if any(cells[w].get(n) is not None for w in columns)
    ]
    if not names:
        return ""
    rows = [[name, *(form(cells[w].get(name)) for w in columns)] for name in names]
    heads = [f"{w} bits" if w.isdigit() else w for w in columns]
    return markdown([title, *heads], rows)


def drafts_table(results: Values) -> str:
    """Tokens a round, right drafts by slot, and what the confidence is worth."""
    found = results.get("drafts", {})
    rows = []
    for name, one in found.items():
        slots = " / ".join(f"{100 * value:.0f}" for value in one["slots"])
        rows.append(
            [name, number(one["tokens_a_round"], 2), str(one["rounds"]), slots,
             number(one.get("mean_confidence"), 2), number(one.get("mean_right"), 2),
             number(one.get("calibration_error"))]
        )  # fmt: skip
    head = ["drafts", "tokens a round", "rounds", "right by slot, %", "mean confidence",
            "mean right", "calibration error"]  # fmt: skip
    return markdown(head, rows) if rows else ""


def skill_tables(evals: Mapping[str, Mapping[str, Values]]) -> list[str]:
    """Right answers, tokens and perplexities by evaluation and label; one column a subject.

    Args:
        evals: subject -> name of the evaluation -> its JSON document.
    """
    tables = []
    for title, figure, only, form in FIGURES:
        rows: dict[str, dict[str, str]] = {}
        for subject, documents in evals.items():
            for name, document in documents.items():
                for label, found in document["figures"].items():
                    if figure in found and only in ("", name):
                        is_counted = figure in COUNTED
                        shown = _counted(found, figure) if is_counted else form(found[figure])
                        shown += "" if document["complete"] else " (not complete)"
                        rows.setdefault(f"{name}: {label}", {})[subject] = shown
        columns = [s for s in evals if any(s in row for row in rows.values())]
        if rows:
            cells = [[name, *(row.get(s, "") for s in columns)] for name, row in rows.items()]
            tables.append(markdown([title, *columns], cells))
    return tables


def _counted(found: Values, figure: str) -> str:
    """What share of the cases has it; of no cases there is no share."""
    cases = found["cases"]
    return f"{share(found[figure] / cases)} of {cases}" if cases else "no cases"


def read_evals(given: Iterable[str]) -> dict[str, dict[str, Values]]:
    """SUBJECT=FILE arguments as documents by subject and evaluation; the last of a name stays.

    Raises:
        ValueError: an argument is not of that form, or a file holds no evaluations.
    """
    found: dict[str, dict[str, Values]] = {}
    for argument in given:
        subject, equals, path = argument.partition("=")
        if not (subject and equals and path):
            raise ValueError(f"--evals: expected SUBJECT=FILE.json, got {argument!r}")
        value = json.loads(Path(path).read_text())
        for document in value if isinstance(value, list) else [value]:
            if not isinstance(document, dict) or not {"name", "by", "figures"} <= set(document):
                raise ValueError(f"{path}: expected what `twinspark eval --json` writes")
            found.setdefault(subject, {})[document["name"]] = document
    return found


def page(results: Values, evals: Mapping[str, Mapping[str, Values]]) -> str:
    """All tables, under headings."""
    parts = [
        ("What it learned", [heldout_table(results)]),
        ("What each part earns", ablation_tables(results)),
        ("What packs keep", retention_tables(results)),
        ("Drafts", [drafts_table(results)]),
        ("Skills", skill_tables(evals)),
    ]
    text = []
    for title, tables in parts:
        shown = [table for table in tables if table]
        if shown:
            text.append("\n\n".join([f"## {title}", *shown]))
    return "\n\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--evals", nargs="*", default=[], metavar="SUBJECT=FILE")
    args = parser.parse_args()
    print(page(json.loads(args.results.read_text()), read_evals(args.evals)), end="")


if __name__ == "__main__":
    main()
