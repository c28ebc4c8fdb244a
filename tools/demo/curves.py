"""Pictures of a training run from its log.jsonl (needs matplotlib, which nothing else here does).

    python -m tools.demo.curves LOG.jsonl OUT_FOLDER [--format svg]

Writes loss.svg (training and held-out loss over tokens), retrieval.svg (index and retrieval
losses, answers right), drafts.svg (draft agreement by slot) and speed.svg. Owns no figures: what
the log lacks is not drawn. A line's losses are those of its one step, and so of its length; its
speed is the mean over all steps since the line before, whatever their lengths. Read next:
`train.py`.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

Point = dict[str, Any]
Series = tuple[list[float], list[float]]
FEW = 20  # points that are marked


class Panel(NamedTuple):
    """Curves by name, or dots where lines of other kinds may be between two of a name."""

    title: str
    x: str
    curves: dict[str, Series]
    is_joined: bool = True


def read_log(path: Path) -> dict[str, list[Point]]:
    """Lines of a log by kind; a run that was killed and resumed may repeat steps: the last stays.

    Held-out lines get the tokens of the training line before them.

    Raises:
        ValueError: a line is no JSON object; a cut last line is left out.
    """
    lines = path.read_text().splitlines()
    found: dict[str, list[Point]] = {}
    tokens = 0
    for number, line in enumerate(lines):
        try:
            point = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"{path}, line {number + 1}: {error}") from error
        tokens = point.get("tokens", tokens)
        if point["kind"] == "heldout":
            point["tokens"] = tokens
        if point["kind"] in ("train", "draft"):
            earlier = found.get(point["kind"], [])
            found[point["kind"]] = [p for p in earlier if p["step"] < point["step"]]
        found.setdefault(point["kind"], []).append(point)
    return found


def series(points: list[Point], x: str, y: str, **only: Any) -> Series:
    """Values of two fields of the points that have both and whose fields equal `only`."""
    kept = [p for p in points if x in p and y in p and all(p.get(k) == v for k, v in only.items())]
    return [float(p[x]) for p in kept], [float(p[y]) for p in kept]


def heldout_series(points: list[Point], field: str) -> dict[str, Series]:
    """Millions of tokens and a field of every source in the held-out lines."""
    sources = dict.fromkeys(k for p in points for k, v in p.items() if isinstance(v, dict))
    found = {}
    for name in sources:
        kept = [p for p in points if field in p.get(name, {})]
        if kept:
            found[name] = ([p["tokens"] / 1e6 for p in kept], [p[name][field] for p in kept])
    return found


def panels(log: dict[str, list[Point]]) -> dict[str, list[Panel]]:
    """What is drawn, by the name of the picture: panels and curves that the log has data for."""
    train, held = log.get("train", []), log.get("heldout", [])
    lengths = sorted({p["length"] for p in train})
    million = "million tokens"
    losses = {
        f"{n:,} tokens": _millions(series(train, "tokens", "loss", length=n)) for n in lengths
    }
    held_out = {f"held out: {n}": s for n, s in heldout_series(held, "loss").items()}
    answers = {f"right: {n}": s for n, s in heldout_series(held, "right").items()}
    parts = {f"{k} loss": _millions(series(train, "tokens", k)) for k in ("index", "find", "copy")}
    speed = {"all lengths": _millions(series(train, "tokens", "tokens_s"))}
    drafts = log.get("draft", [])
    slots = len(drafts[0]["agree"]) if drafts else 0
    agree = {
        f"slot {j + 1}": ([float(p["step"]) for p in drafts], [p["agree"][j] for p in drafts])
        for j in range(slots)
    }
    found = {
        "loss": [
            Panel("training loss of a step by its length, nats", million, losses, is_joined=False),
            Panel("held-out loss", million, held_out),
        ],
        "retrieval": [Panel("losses", million, parts), Panel("answers right", million, answers)],
        "drafts": [Panel("drafts that are the model's own choice", "step", agree)],
        "speed": [Panel("tokens a second, all lengths since the last line", million, speed)],
    }
    full = {
        name: [p._replace(curves={k: s for k, s in p.curves.items() if s[0]}) for p in given]
        for name, given in found.items()
    }
    drawn = {name: [panel for panel in given if panel.curves] for name, given in full.items()}
    return {name: given for name, given in drawn.items() if given}


def draw(log: dict[str, list[Point]], out: Path, form: str) -> list[Path]:
    """The pictures that the log has data for."""
    return [_picture(given, out / f"{name}.{form}") for name, given in panels(log).items()]


def _millions(values: Series) -> Series:
    return [v / 1e6 for v in values[0]], values[1]


def _picture(given: list[Panel], path: Path) -> Path:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(given), figsize=(7 * len(given), 4.5), squeeze=False)
    for axis, panel in zip(axes[0], given, strict=True):
        for name, (x, y) in panel.curves.items():
            if panel.is_joined:
                axis.plot(x, y, label=name, linewidth=1.2, marker="." if len(x) < FEW else None)
            else:
                axis.plot(x, y, ".", label=name, markersize=4)
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", default="svg", choices=["svg", "png"])
    args = parser.parse_args()
    for path in draw(read_log(args.log), args.out, args.format):
        print(path)


if __name__ == "__main__":
    main()
