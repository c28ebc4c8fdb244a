"""Everything that only a CUDA device can tell, step by step: tests, kernels, a rank, idle time.

Every step is a process of its own with its own limit, so one that fails or hangs costs the others
nothing. Each leaves `NAME.log`, benches leave `NAME.json`, and `trial.json` says how all of them
ended, written anew after every step. Run it from the repository:

    python tools/gpu_trial.py --out trial [--only tests,idle] [--budget 580] [--dry]

With --dry nothing needs a device: every step is looked at (files, options, tests that are found)
and what would stop it is said.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL_GROUPS = ("products", "experts", "attention", "index", "head", "residual", "plain")
KERNEL_TESTS = (
    "attention_cuda", "cache_rows", "engram_cuda", "exchange", "exl3_cuda", "exl3_joined",
    "exl3_many", "exl3_whole", "experts_cuda", "experts_windows", "head_cuda", "index_cuda",
    "latents", "pinned", "places", "plain_cuda", "residual_cuda",
)  # fmt: skip
MARK = "gpu and not slow"
CACHE = Path(tempfile.gettempdir()) / "twinspark-gpu-cache"
"""Compiled kernels of all steps, and of later trials on the machine."""
_GRACE_S = 10  # from an interrupt to the end
_FREE_S = 5  # left of the budget, less than that starts nothing
_TAIL = 20  # lines of a log that are shown when its step fails


@dataclass(frozen=True)
class Step:
    """A process.

    Attributes:
        name: of its files.
        group: what `--only` knows it by.
        command: arguments of python.
        limit_s: it is ended after that.
        dry: arguments that look at the same without a device.
        alone: it is timed, so nothing may run beside it.
    """

    name: str
    group: str
    command: tuple[str, ...]
    limit_s: int
    dry: tuple[str, ...]
    alone: bool = True


@dataclass(frozen=True)
class Ending:
    """How a step ended: ok, failed, "out of time" or "not started", with what is to be said."""

    name: str
    state: str
    seconds: float
    note: str = ""


def steps(out: Path) -> list[Step]:
    """All of them, in the order in which they are worth their time."""
    found = [_test("same-bits", "tests/gpu", 480)]
    found += [
        _test(f"kernels-{name}", f"tests/kernels/test_{name}.py", 300) for name in KERNEL_TESTS
    ]
    found.append(_test("cells-run", "tests/unit/bench", 300))
    found.append(_test("trellis", "tests/unit/quantize/test_trellis.py", 200))
    found.append(
        Step(
            "idle",
            "idle",
            ("tools/gpu_trial.py", "--idle", str(out / "idle.json")),
            240,
            ("-c", "import twinspark.bench.device_idle, twinspark.llm"),
        )  # fmt: skip
    )
    cli = ("-m", "twinspark", "bench")
    found.append(
        Step("rank", "rank", (*cli, "rank", "--json", str(out / "rank.json")), 540,
             (*cli, "rank", "--help"))
    )  # fmt: skip
    for group in KERNEL_GROUPS:
        name = f"cells-{group}"
        command = (*cli, "kernels", "--only", group, "--json", str(out / f"{name}.json"))
        found.append(Step(name, "cells", command, 300, (*cli, "kernels", "--help")))
    engine = (*cli, "engine", "--device", "cuda", "--json", str(out / "engine.json"))
    found.append(Step("engine", "engine", engine, 400, (*cli, "engine", "--help")))
    return found


def _test(name: str, path: str, limit_s: int) -> Step:
    pytest = ("-m", "pytest", path, "-q", "-p", "no:cacheprovider", "-m", MARK)
    command = (*pytest, "--durations=5")
    return Step(name, "tests", command, limit_s, (*pytest, "--collect-only"), alone=False)


class Trial:
    """Runs steps and keeps what is to be told of them."""

    def __init__(self, out: Path, *, budget_s: float, dry: bool) -> None:
        """Results go to `out`, which is made; no step is started beyond the budget."""
        self.endings: list[Ending] = []
        self._out, self._dry = out, dry
        self._end_s = time.monotonic() + budget_s
        out.mkdir(parents=True, exist_ok=True)

    def run(self, chosen: Sequence[Step], jobs: int) -> bool:
        """Those that may share the device first, `jobs` at a time; whether all went well."""
        with ThreadPoolExecutor(jobs) as pool:
            for ending in pool.map(self._run, [step for step in chosen if not step.alone]):
                self._tell(ending)
        for step in chosen:
            if step.alone:
                self._tell(self._run(step))
        return all(ending.state == "ok" for ending in self.endings)

    def _run(self, step: Step) -> Ending:
        left_s = self._end_s - time.monotonic()
        if left_s < _FREE_S:
            return Ending(step.name, "not started", 0.0, "the budget is spent: run it with --only")
        path = self._out / f"{step.name}.log"
        command = [sys.executable, *(step.dry if self._dry else step.command)]
        began = time.monotonic()
        code = _ended(command, path, min(step.limit_s, left_s), threads=None if step.alone else 1)
        if code is None:
            note = f"its limit was {min(step.limit_s, left_s):.0f} s\n{_last(path, 3)}"
            return Ending(step.name, "out of time", time.monotonic() - began, note)
        seconds = time.monotonic() - began
        if code:
            return Ending(step.name, "failed", seconds, f"exit code {code}\n{_last(path, _TAIL)}")
        return Ending(step.name, "ok", seconds, _last(path, 1))

    def _tell(self, ending: Ending) -> None:
        self.endings.append(ending)
        print(f"{ending.state:<12} {ending.seconds:6.1f} s  {ending.name}: {ending.note}")
        sys.stdout.flush()
        document = {
            "what": "tools/gpu_trial.py", "dry": self._dry, "python": sys.version.split()[0],
            "steps": [asdict(ending) for ending in self.endings],
        }  # fmt: skip
        (self._out / "trial.json").write_text(json.dumps(document, indent=2) + "\n")


def _ended(command: Sequence[str], log: Path, limit_s: float, *, threads: int | None) -> int | None:
    """The exit code of a process that writes to a log; None if it had to be ended.

    It is interrupted first, so that a bench writes what it has, with all that it has started. Those
    that run side by side have as many threads as told: with all cores each, they take minutes more.
    """
    cache = {"XDG_CACHE_HOME": str(CACHE), "TEST_CACHE_HOME": str(CACHE)}
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = os.environ | cache | {"PYTHONPATH": path}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        for kind in (signal.SIGINT, signal.SIGKILL, None):
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                assert kind is not None, "a killed process does not end"
                os.killpg(process.pid, kind)
                limit_s = _GRACE_S
            else:
                return code if kind is signal.SIGINT else None
    raise AssertionError("one of the waits ends it")


def _last(path: Path, count: int) -> str:
    return "\n".join(path.read_text(errors="replace").rstrip().splitlines()[-count:])


def measure_idle_into(path: Path) -> None:
    """Idle time at 1 and 4 slots without drafts, with draft passes and with copies."""
    from twinspark.bench.device_idle import measure_idle
    from twinspark.bench.engine import TEXTS
    from twinspark.llm import LLM

    found = []
    for lookup in (False, True):
        with LLM.demo(device="cuda", slots=4, lookup=lookup) as llm:
            # a text that repeats itself is copied from
            prompts = [
                [llm.tokenizer.bos_id, *llm.tokenizer.encode_plain((3 if lookup else 1) * text)]
                for text in TEXTS["code"]
            ]
            for kind in ("copies",) if lookup else ("no drafts", "draft passes"):
                for slots in (1, 4):
                    found.append(measure_idle(llm.engine, prompts[:slots], kind))
                    print(found[-1])
    path.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")


def main() -> int:
    """See the top of the file; 1 when a step did not go well."""
    parser = argparse.ArgumentParser(description="Tests and benches that need a CUDA device.")
    groups = sorted({step.group for step in steps(Path())})
    parser.add_argument("--out", type=Path, default=Path("trial"), help="folder of the results")
    parser.add_argument("--only", default=",".join(groups), help="groups or names, with commas")
    parser.add_argument("--budget", type=float, default=580.0, help="seconds for all steps")
    parser.add_argument("--jobs", type=int, default=4, help="test files at a time")
    parser.add_argument("--dry", action="store_true", help="look at every step without a device")
    parser.add_argument("--idle", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.idle is not None:
        measure_idle_into(given.idle)
        return 0
    wanted = [name.strip() for name in given.only.split(",") if name.strip()]
    everything = steps(given.out.resolve())
    known = {step.group for step in everything} | {step.name for step in everything}
    if not wanted or set(wanted) - known:
        parser.error(f"--only is {given.only!r}, expected some of {', '.join(sorted(known))}")
    if find_spec("pytest") is None:
        parser.error("pytest is not installed here; `make test` installs the test tools")
    if not given.dry and (reason := why_no_device()):
        parser.error(f"{reason}; --dry looks at every step without one")
    chosen = [step for step in everything if {step.group, step.name} & set(wanted)]
    trial = Trial(given.out.resolve(), budget_s=given.budget, dry=given.dry)
    return 0 if trial.run(chosen, max(1, given.jobs)) else 1


def why_no_device() -> str | None:
    """Why nothing can be measured here, or None."""
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device here"


if __name__ == "__main__":
    sys.exit(main())
