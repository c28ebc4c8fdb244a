"""Everything that a machine with two GPUs has to show, in one go and under one limit.

    python -m tools.pair_trial OUT_FOLDER [--limit-s 600] [--only facts,bits,...] [--dry]

Steps run one after another. Each has a limit of its own and leaves what it said in OUT_FOLDER; one
that fails or is out of time does not hold up the others. Written after every step: `trial.json`,
with what ran, how long, how it ended, and the figures the steps wrote.

All of it takes about ten minutes on two H200s. Where a command may take no longer, two do: `--only
"cards,facts,doctor,prebuild,one card,exchange,bits,fails"`, then `companies,model,rank alone`.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-q", "-x", "--timeout=280", "-p", "no:cacheprovider")
CACHE = Path(tempfile.gettempdir()) / "twinspark-pair-cache"
"""Compiled kernels of all steps, and of later trials on the machine."""
LEAST_S = 15.0
KILL_S = 10.0
TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Step:
    """One program to run.

    Attributes:
        name: of the step, and of its files.
        command: a program and its arguments; "{out}" is the folder of results.
        limit_s: longest run.
        figures: file in the folder, JSON or a line of JSON each, that is taken into the result.
        environment: set for it.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    figures: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def python(*arguments: str) -> tuple[str, ...]:
    """A command of this interpreter."""
    return (sys.executable, *arguments)


FACTS = (
    "import json, torch; n = torch.cuda.device_count(); "
    "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, "
    "'nccl': list(torch.cuda.nccl.version()), "
    "'devices': [torch.cuda.get_device_name(i) for i in range(n)], "
    "'peer access': n > 1 and torch.cuda.can_device_access_peer(0, 1)}))"
)

STEPS = (
    Step(name="cards", command=("nvidia-smi", "topo", "-m"), limit_s=20),
    Step(name="facts", command=python("-c", FACTS), limit_s=60),
    Step(name="doctor", command=python("-m", "twinspark", "doctor", "--json"), limit_s=60),
    Step(name="prebuild", command=python("-m", "twinspark", "prebuild"), limit_s=180),
    Step(
        name="one card",
        command=python(
            *PYTEST, "-m", "gpu", "tests/gpu/test_ranks_on_one_card.py",
            "tests/kernels/test_exchange.py",
        ),
        limit_s=180,
    ),
    Step(
        name="exchange",
        command=python(
            "-m", "twinspark", "bench", "pair", "--only", "exchange", "--json",
            "{out}/exchange.json",
        ),
        limit_s=120,
        figures="exchange.json",
    ),
    Step(
        name="bits",
        command=python(*PYTEST, "-m", "multigpu", "tests/multigpu/test_pair_bits.py"),
        limit_s=240,
    ),
    Step(
        name="companies",
        command=python(*PYTEST, "-m", "multigpu", "tests/multigpu/test_pair_companies.py"),
        limit_s=280,
    ),
    Step(
        name="fails",
        command=python(
            *(part for part in PYTEST if part != "-x"), "-m", "multigpu",
            "tests/multigpu/test_pair_fails.py", "tests/multigpu/test_pair_serves.py",
        ),
        limit_s=300,
        figures="times.jsonl",
        environment={"PAIR_TIMES": "{out}/times.jsonl"},
    ),
    Step(
        name="model",
        command=python(
            "-m", "twinspark", "bench", "pair", "--only", "model", "--json", "{out}/pair.json"
        ),
        limit_s=300,
        figures="pair.json",
    ),
    Step(
        name="rank alone",
        command=python("-m", "twinspark", "bench", "rank", "--json", "{out}/rank.json"),
        limit_s=180,
        figures="rank.json",
    ),
)  # fmt: skip


def run_step(step: Step, out: Path, limit_s: float) -> dict[str, Any]:
    """Run one step; what came of it."""
    begin = time.monotonic()
    command = [part.replace("{out}", str(out)) for part in step.command]
    extra = {name: text.replace("{out}", str(out)) for name, text in step.environment.items()}
    cache = {"XDG_CACHE_HOME": str(CACHE), "TEST_CACHE_HOME": str(CACHE)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = out / f"{step.name.replace(' ', '-')}.log"
    ended = "ok"
    with log.open("w") as said:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **cache, **extra, "PYTHONPATH": path},
            )  # fmt: skip
        except OSError as error:
            return {"ended": f"cannot be started: {error}", "seconds": 0.0}
        try:
            code = process.wait(limit_s)
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {limit_s:.0f} s"
        finally:
            end_group(process)
    found: dict[str, Any] = {"ended": ended, "seconds": round(time.monotonic() - begin, 1)}
    found["tail"] = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    if step.figures is not None:
        found["figures"] = read_figures(out / step.figures)
    return found


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a step with all that it started, ranks in sessions of their own excepted: they follow."""
    for number, wait_s in ((signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def read_figures(path: Path) -> Any:
    """A file of JSON, or of a line of JSON each; None where there is none."""
    if not path.is_file():
        return None
    text = path.read_text()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line]


def run_trial(steps: Sequence[Step], out: Path, limit_s: float) -> dict[str, Any]:
    """Run steps until they are over or the time is; the result, which is also in trial.json."""
    until_s = time.monotonic() + limit_s
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "machine": platform.machine(),
        "python": platform.python_version(), "limit_s": limit_s, "steps": {},
    }  # fmt: skip
    for step in steps:
        left_s = until_s - time.monotonic()
        if left_s < LEAST_S:
            result["steps"][step.name] = {"ended": "not begun: the time is over", "seconds": 0.0}
        else:
            result["steps"][step.name] = run_step(step, out, min(step.limit_s, left_s))
        found = result["steps"][step.name]
        print(f"{step.name:<12} {found['seconds']:>7.1f} s  {found['ended']}", flush=True)
        (out / "trial.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder of results")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--only", default="", help="names of steps, with commas")
    parser.add_argument("--dry", action="store_true", help="say what would run, and run nothing")
    given = parser.parse_args(arguments)
    wanted = [name.strip() for name in given.only.split(",") if name.strip()]
    unknown = sorted(set(wanted) - {step.name for step in STEPS})
    if unknown:
        parser.error(f"no step {unknown[0]!r}; there are {', '.join(s.name for s in STEPS)}")
    if not given.dry and find_spec("pytest") is None:
        parser.error("pytest is not installed here; `make test` installs the test tools")
    steps = [step for step in STEPS if not wanted or step.name in wanted]
    if given.dry:
        for step in steps:
            line = " ".join(part.replace("{out}", str(given.out)) for part in step.command)
            print(f"{step.name:<12} at most {step.limit_s:>4.0f} s  {line}")
        return 0
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    result = run_trial(steps, out, given.limit_s)
    return 0 if all(found["ended"] == "ok" for found in result["steps"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
