"""The training on a lent GPU, in steps of a few minutes that go on from the machine's own disk.

    python -m tools.demo.expedition A DEMO WORK OUT [--carry FOLDER]     unpack, backbone to BREAK
    python -m tools.demo.expedition B DEMO WORK OUT                      backbone to the end
    python -m tools.demo.expedition C DEMO WORK OUT                      drafts, packs, evaluation
    python -m tools.demo.expedition packs DEMO WORK OUT --widths 2,3     packs that C kept in WORK

With `--start CHECKPOINT` A (from BEGIN on) and C go on from an earlier edition's parameters.

Each step leaves in OUT what should be carried away: at most 8 files of at most 15 MB. Every step
may be killed and run again: A and B resume, C repeats only what has no result yet. `collect`
(here) puts the files of several OUTs together again. Read next: `train.py`, `packs.py`.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tools.demo import config as demo_config
from tools.demo import evaluate, packs, rehearsal
from tools.demo.checkpoint import from_release, load, write_index
from tools.demo.curriculum import SOURCES, Plan
from tools.demo.decode import Decoder, continue_texts
from tools.demo.train_draft import DraftPlan, draw_texts, freeze
from tools.demo.twin import Twin

from twinspark.quantize.calibrate import Calibration

BREAK = 0.42  # progress at the end of A
BEGIN = 0.40  # progress at which A begins with --start: the rate is full and falls from here on
PART_BYTES = 15_000_000
BEGAN = time.monotonic()


class Expedition:
    """One step: its folders, its clock, its plans."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.demo, self.work, self.out = args, args.demo, args.work, args.out
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.plan, self.draft_plan = Plan(), DraftPlan()
        if args.rehearsal:
            self.plan, self.draft_plan = rehearsal.PLAN, rehearsal.DRAFT_PLAN

    def left(self) -> float:
        """Seconds left of this step."""
        return float(self.args.seconds) - (time.monotonic() - BEGAN)

    def note(self, kind: str, **values: Any) -> None:
        """One line to the terminal and to WORK/log.jsonl."""
        line = json.dumps({"t": round(time.monotonic() - BEGAN, 1), "kind": kind, **values})
        print(line, flush=True)
        with open(self.work / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def python(self, module: str, *args: str, wait: bool = True) -> subprocess.Popen[bytes]:
        """Runs a module of tools.demo in a process of its own.

        Raises:
            RuntimeError: it failed (when waited for).
        """
        child = subprocess.Popen([sys.executable, "-m", f"tools.demo.{module}", *args])
        if wait and child.wait() != 0:
            raise RuntimeError(f"tools.demo.{module} ended with {child.returncode}")
        return child

    # -- A and B ----------------------------------------------------------------------------------

    def unpack(self) -> subprocess.Popen[bytes] | None:
        """Starts unpacking beside the compilation; the trainer waits for the marker."""
        marker, failed = self.demo / "data" / "ready", self.demo / "data" / "failed"
        if self.args.carry is None or marker.exists():
            return None
        failed.unlink(missing_ok=True)
        head = self.args.carry / "head"
        if head.is_dir():  # config.json, token_map.npy: enough to compile with
            shutil.copytree(head, self.demo, dirs_exist_ok=True)
        code = (
            "import subprocess, sys, pathlib;"
            f"code = subprocess.run([sys.executable, '-m', 'tools.demo.carry', 'unpack', "
            f"{str(self.args.carry)!r}, {str(self.demo)!r}]).returncode;"
            f"told = pathlib.Path({str(failed)!r} if code else {str(marker)!r});"
            "told.parent.mkdir(parents=True, exist_ok=True); told.touch(); sys.exit(code)"
        )
        child = subprocess.Popen([sys.executable, "-c", code])
        if not head.is_dir() and child.wait() != 0:
            raise RuntimeError(f"unpacking {self.args.carry} failed")
        return child

    def backbone(self, name: str) -> None:
        """A or B: as far as its time allows, and the checkpoint of what there is."""
        child = self.unpack()
        self.settle_config()
        begun = self.args.start is not None
        first = (BEGIN + 1) / 2 if begun else BREAK
        more = ["--to", str(first if name == "A" else 1.0)]
        if child is not None:
            more += ["--wait", str(self.demo / "data" / "ready")]
        if begun:
            more += ["--start", str(self.args.start), "--progress", str(BEGIN)]
        reserve = 2 if self.args.rehearsal else 25  # evaluation and export
        self.survive("backbone", lambda: self.left() - reserve, self.work / "state.pt", *more)
        if child is not None and child.wait() != 0:
            raise RuntimeError(f"unpacking {self.args.carry} failed")
        self.carry_away([*self.checkpoint_files("backbone"), self.work / "log.jsonl"])

    def survive(self, command: str, seconds: Callable[[], float], state: Path, *more: str) -> None:
        """`train`, from `state` if it is there; once more without graphs if it breaks off.

        Raises:
            RuntimeError: it failed twice, or too late for another try.
        """

        def call(*flags: str) -> None:
            resume = ["--resume"] if state.is_file() else []
            self.train(command, str(max(5.0, seconds())), *more, *resume, *flags)

        try:
            call()
        except RuntimeError as error:
            self.note("failed", command=command, error=str(error), left=round(self.left()))
            if seconds() < 60:
                raise
            call("--no-graph")

    def settle_config(self) -> None:
        """WORK/config.json with today's sizes: unpacking may write DEMO's at any time."""
        path = self.work / "config.json"
        if not path.is_file():
            shutil.copy(self.demo / "checkpoint" / "config.json", path)
            if not self.args.rehearsal:
                demo_config.refresh(self.work)

    def train(self, command: str, until: str, *more: str) -> None:
        """One call of the trainer."""
        every = ["--log-every", "5"] if self.args.rehearsal else ["--log-every", "25"]
        if command == "drafts":
            every = []
        if self.args.rehearsal and command == "backbone":
            every += ["--save-seconds", "2", "--eval-seconds", "15"]
        flags = [f"--no-{n}" for n in ("compile", "graph") if not getattr(self.args, n)]
        where = [str(self.demo), "--out", str(self.work), "--device", self.args.device]
        plan = ["--config", str(self.work / "config.json")]
        plan += ["--rehearsal"] if self.args.rehearsal else []
        self.python("train", command, *where, "--until", until, *every, *flags, *plan, *more)

    def checkpoint_files(self, stem: str) -> list[Path]:
        """Files of the exported checkpoint."""
        return sorted((self.work / "checkpoint").glob(f"{stem}-*.safetensors"))

    def carry_away(self, files: list[Path]) -> None:
        """Copies files to OUT, those over PART_BYTES in parts."""
        for path in files:
            name = path.name if path.parent.name != "mix" else f"mix.{path.name}"
            size = path.stat().st_size
            if size <= PART_BYTES:
                shutil.copy(path, self.out / name)
                continue
            data, count = path.read_bytes(), math.ceil(size / PART_BYTES)
            for n in range(count):
                part = data[n * PART_BYTES : (n + 1) * PART_BYTES]
                (self.out / f"{name}.part{n}").write_bytes(part)
        self.note("carried", files=sorted(p.name for p in self.out.iterdir()))

    # -- C ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """C: drafts, packs, evaluation, each once."""
        wanted = self.work / "checkpoint"
        if not self.checkpoint_files("backbone"):
            raise FileNotFoundError(f"{wanted} holds no backbone; run B first")
        share = 0.3 if self.args.rehearsal else 0.48
        if not self.checkpoint_files("mtp"):
            more = ["--start", str(self.args.start)] if self.args.start is not None else []
            try:
                self.survive("drafts", lambda: self.left() * share, self.work / "drafts.pt", *more)
            except RuntimeError:  # noted; what needs no drafts is still worth having
                self.once("ablations.json", self.judge_ablations)
                self.results()
                raise
        write_index(wanted)
        calibration = self.start_calibration()
        self.once("drafts.json", self.judge_drafts)
        self.carry_away([*self.checkpoint_files("mtp"), self.work / "log.jsonl"])
        self.once("ablations.json", self.judge_ablations)
        self.await_calibration(calibration)
        self.make_packs()
        for width in self.args.widths.split(","):
            made = (self.work / "packs" / width / "config.json").is_file()
            if made and (self.left() > 20 or self.args.rehearsal):
                self.once(f"retention-{width}.json", lambda w=width: self.judge_pack(w))
        self.results()

    def start_calibration(self) -> subprocess.Popen[bytes]:
        """Hessians on the CPU, beside evaluations on the GPU."""
        share = "0.05" if self.args.rehearsal else "0.4"
        where = [str(self.work / "checkpoint"), str(self.demo / "data"), str(self.hessians)]
        if self.hessians.is_file():
            return subprocess.Popen(["true"])
        return self.python("packs", "calibrate", *where, "--share", share, wait=False)

    def await_calibration(self, child: subprocess.Popen[bytes]) -> None:
        """Waits while there is time for a pack afterwards; without Hessians packs are made too."""
        try:
            child.wait(max(20.0, self.left() - (0 if self.args.rehearsal else 75)))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self.note("calibration", code=child.returncode, left=round(self.left()))

    @property
    def hessians(self) -> Path:
        """Where the calibration is kept."""
        return self.work / "hessians.pt"

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Writes WORK/results/NAME unless it is there; a failure costs this result only."""
        path = self.work / "results" / name
        path.parent.mkdir(exist_ok=True)
        if path.is_file():
            return
        began = time.monotonic()
        try:
            found = make()
        except Exception as error:  # whatever it was, other results can still be made
            self.note("failed", result=name, error=repr(error)[:500])
            return
        path.write_text(json.dumps(found, indent=1) + "\n")
        self.note("result", name=name, seconds=round(time.monotonic() - began, 1))

    def results(self) -> None:
        """Everything measured, as one file, and the demo pack."""
        found = {p.stem: json.loads(p.read_text()) for p in (self.work / "results").glob("*.json")}
        (self.work / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        mix = self.work / "packs" / "mix"
        files = [self.work / "results.json", self.work / "log.jsonl"]
        names = ("model.safetensors", "config.json", "twinspark.json")
        self.carry_away(files + [mix / n for n in names if (mix / n).is_file()])

    def twin(self, params: dict[str, torch.Tensor] | None = None) -> Twin:
        """The trained twin, frozen, or the same model with other parameters."""
        import numpy as np

        text = json.loads((self.work / "checkpoint/config.json").read_text())
        token_map = torch.from_numpy(np.load(self.demo / "data/token_map.npy"))
        twin = Twin(text, token_map, self.args.device)
        if params is None:
            params = from_release(load(self.work / "checkpoint"), text["text_config"])
        twin.params = {n: p.to(self.args.device).float() for n, p in params.items()}
        freeze(twin)
        return twin

    def batches(self, split: str) -> Any:
        """Token files, from the beginning."""
        from tools.demo.batches import Batches

        return Batches(self.demo / "data", split, self.args.device, 12)

    def here(self, batches: Any) -> Plan:
        """The plan without what has no file."""
        from tools.demo.train import restrict

        return restrict(self.plan, [n for n in SOURCES if n in batches.names])

    def judge_drafts(self) -> dict[str, Any]:
        """Accepted drafts on greedy continuations of held-out text, source by source."""
        twin, held = self.twin(), self.batches("heldout")
        plan = self.draft_plan
        count = 8 if self.args.rehearsal else 128  # 65,000 blocks; their logits: 1.3e9 values
        result = {}
        decoder = Decoder(twin, count, plan.length, graph=self.args.graph)
        for name in plan.shares:
            if name not in held.names:
                continue
            held.restore({"drawn": {}, "owed": {}})
            only = DraftPlan(length=plan.length, drawn=plan.drawn, shares={name: 1.0})
            ids = draw_texts(held, only, count)
            given = torch.full((count,), plan.length // 4, device=twin.device)
            cold = torch.zeros(count, device=twin.device)
            texts = continue_texts(decoder, ids, given, cold)
            result[name] = evaluate.acceptance(twin, texts, given)
        return result

    def make_packs(self) -> None:
        """Packs of every width in WORK/packs, from one calibration."""
        folder, left = self.work / "packs", self.args.widths.split(",")
        left = [w for w in left if not (folder / w / "config.json").is_file()]
        if not left:
            return
        checkpoint = packs.open_pack(self.work / "checkpoint")
        calibration = Calibration({}, {}, 0, 0)  # rounding without feedback
        if self.hessians.is_file():
            calibration = packs.load_calibration(self.hessians)
        self.note("calibrated", tokens=calibration.tokens)
        limit = 50_000 if self.args.rehearsal else 0  # a CPU would take hours for all
        for width in left:
            if width != left[0] and self.left() < 45 and not self.args.rehearsal:
                self.note("left_out", pack=width)
                continue
            shutil.rmtree(folder / width, ignore_errors=True)
            self.once(
                f"pack-{width}.json",
                lambda w=width: packs.make_pack(
                    checkpoint, folder / w, w, calibration, self.args.device, limit=limit
                ),
            )
            self.results()  # at once: the first width is the demo pack

    def judge_ablations(self) -> dict[str, Any]:
        """Held-out loss and right answers with one part of the model off."""
        held = self.batches("heldout")
        plan = self.here(held)
        return evaluate.ablations(self.twin(), held, plan, plan.tokens * 2)

    def judge_pack(self, width: str) -> dict[str, Any]:
        """Held-out loss, right answers, agreement and drafts of a pack."""
        pack = packs.open_pack(self.work / "packs" / width)
        narrow, held = self.twin(packs.twin_params(pack)), self.batches("heldout")
        plan = self.here(held)
        found = {"agreement": evaluate.compare(self.twin(), narrow, held, plan, plan.tokens)}
        held.restore({"drawn": {}, "owed": {}})
        return found | {"heldout": evaluate.heldout(narrow, held, plan, plan.tokens * 2)}

    def packs(self) -> None:
        """Carries packs away that C made."""
        for width in self.args.widths.split(","):
            pack = self.work / "packs" / width / "model.safetensors"
            for small in ("config.json", "twinspark.json"):  # `place.py` checks by these
                shutil.copy(pack.with_name(small), self.out / f"{width}.{small}")
            data = pack.read_bytes()
            for n in range(math.ceil(len(data) / PART_BYTES)):
                part = data[n * PART_BYTES : (n + 1) * PART_BYTES]
                (self.out / f"{width}.{pack.name}.part{n}").write_bytes(part)


def collect(outs: list[Path], folder: Path) -> None:
    """Files of several OUTs in one folder, parts joined."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Path]] = {}
    for out in outs:
        for path in sorted(out.iterdir()):
            stem, _, number = path.name.rpartition(".part")
            if stem and number.isdigit():
                parts.setdefault(stem, []).append(path)
            else:
                shutil.copy(path, folder / path.name)
    for stem, found in parts.items():
        found.sort(key=lambda p: int(p.name.rpartition(".part")[2]))
        (folder / stem).write_bytes(b"".join(p.read_bytes() for p in found))


def main() -> None:
    if sys.argv[1:2] == ["collect"]:
        collect([Path(p) for p in sys.argv[2:-1]], Path(sys.argv[-1]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["A", "B", "C", "packs", "collect"])
    for name in ("demo", "work", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--carry", type=Path, help="archives of the data (A)")
    parser.add_argument("--start", type=Path, help="an earlier edition's checkpoint (A, C)")
    parser.add_argument("--seconds", type=float, default=520, help="of this step, all in all")
    parser.add_argument("--widths", default=",".join(packs.WIDTHS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", dest="graph", action="store_false")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rehearsal", action="store_true", help="small shapes")
    args = parser.parse_args()
    args.graph = args.graph and args.device == "cuda"
    args.compile = args.compile and args.device == "cuda"
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")
    expedition = Expedition(args)
    if args.step in "AB":
        expedition.backbone(args.step)
    elif args.step == "C":
        expedition.finish()
    else:
        expedition.packs()


if __name__ == "__main__":
    main()
