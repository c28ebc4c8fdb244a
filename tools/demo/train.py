"""Trains the demo model: the backbone in one or more calls, then its draft blocks.

    python -m tools.demo.train backbone DEMO --out OUT --to 0.5 --until 500
    python -m tools.demo.train backbone DEMO --out OUT --to 1.0 --until 500 --resume
    python -m tools.demo.train drafts DEMO --out OUT --until 240

DEMO holds checkpoint/ (config.json, tokenizer.json) and data/ as `data.py` leaves them. OUT
receives log.jsonl, the run (state.pt) and the checkpoint in release layout. `--until` counts from
the start of the process. Read next: `backbone.py`, `train_draft.py`, `expedition.py`.
"""

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
from tools.demo import checkpoint, evaluate, rehearsal
from tools.demo.backbone import Backbone, Options, Pace
from tools.demo.batches import Batches
from tools.demo.curriculum import SOURCES, Plan
from tools.demo.init import initial
from tools.demo.train_draft import DraftPlan, train_drafts
from tools.demo.twin import Twin

BEGAN = time.monotonic()
PART_BYTES = 15_000_000  # of a checkpoint's file


def present(folder: pathlib.Path, split: str) -> list[str]:
    """The sources whose token files exist.

    Raises:
        FileNotFoundError: there are none.
    """
    found = [n for n in SOURCES if (folder / f"{n}.{split}.bin").is_file()]
    if not found:
        raise FileNotFoundError(f"{folder} holds no NAME.{split}.bin; run tools.demo.data first")
    return found


def restrict(plan: Plan, names: list[str]) -> Plan:
    """The plan without sources that do not exist, and without lengths left with none."""
    shares = {n: {s: w for s, w in mix.items() if s in names} for n, mix in plan.shares}
    kept = {n: mix for n, mix in shares.items() if mix}
    stages = []
    for until, mix in plan.stages:
        inside = {n: w for n, w in mix.items() if n in kept}
        total = sum(inside.values())
        stages.append((until, {n: w / total for n, w in inside.items()} or {min(kept): 1.0}))
    return Plan(plan.tokens, tuple(kept.items()), tuple(stages), plan.long_from, plan.finds)


class Run:
    """What every command needs: twin, tokens, log."""

    def __init__(
        self, demo: pathlib.Path, out: pathlib.Path, device: str, config: pathlib.Path | None
    ) -> None:
        self.demo, self.out, self.device = demo, out, device
        self.out.mkdir(parents=True, exist_ok=True)
        self.config = json.loads((config or demo / "checkpoint/config.json").read_text())
        token_map = torch.from_numpy(np.load(demo / "data/token_map.npy"))
        self.twin = Twin(self.config, token_map, device)

    def log(self, kind: str, **values: Any) -> None:
        """One line to the terminal and to log.jsonl; t counts from the start of the process."""
        line = json.dumps({"t": round(time.monotonic() - BEGAN, 1), "kind": kind, **values})
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def batches(self, split: str, seed: int) -> Batches:
        """The token files of a split, on the device."""
        return Batches(self.demo / "data", split, self.device, seed)

    def set_params(self, *folders: pathlib.Path) -> None:
        """Parameters of checkpoints in release layout, the last one that has them; else initial.

        Raises:
            FileNotFoundError: a folder holds no tensors.
        """
        params = initial(self.config)
        for folder in folders:
            stored = checkpoint.load(folder)
            if not stored:
                raise FileNotFoundError(f"{folder} holds no *.safetensors; nothing to start from")
            params |= checkpoint.from_release(stored, self.config["text_config"])
        self.twin.params = {n: p.to(self.device).float() for n, p in params.items()}

    def validate(self, heldout: Any, plan: Plan) -> None:
        """Held-out losses and right answers by source, on the same windows each time."""
        heldout.restore({"drawn": {}, "owed": {}})
        self.log("heldout", **evaluate.heldout(self.twin, heldout, plan, plan.tokens // 2))

    def export(self, *, drafts: bool) -> None:
        """The checkpoint of the twin's parameters, in files of at most PART_BYTES."""
        tensors = checkpoint.to_release(self.twin.params, self.twin.text)
        parts = {"backbone": {n: t for n, t in tensors.items() if not n.startswith("mtp.")}}
        if drafts:
            parts["mtp"] = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
        folder = self.out / "checkpoint"
        folder.mkdir(exist_ok=True)
        for stem, part in parts.items():
            for old in folder.glob(f"{stem}-*.safetensors"):
                old.unlink()
            names = checkpoint.save(part, folder, stem, limit=PART_BYTES)
            self.log("saved", files=names)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        for name in checkpoint.TEXT_FILES:
            source = self.demo / "checkpoint" / name
            if source.is_file():
                (folder / name).write_bytes(source.read_bytes())


def _wait(path: pathlib.Path, seconds: float) -> None:
    """Waits for a file that another process writes when the data is unpacked.

    Raises:
        RuntimeError: that process said that it failed.
        TimeoutError: it said nothing in so many seconds.
    """
    end = time.monotonic() + seconds
    while not path.exists():
        if path.with_name("failed").exists():
            raise RuntimeError(f"unpacking failed, so {path} will not appear; see the lines above")
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not appear in {seconds:.0f} s; is the data unpacked?")
        time.sleep(0.2)


def backbone(run: Run, args: argparse.Namespace, plan: Plan) -> None:
    """One call of the backbone's training."""
    run.set_params(*filter(None, [args.start]))
    options = Options(
        args.compile, args.graph, args.log_every, args.save_seconds, args.eval_seconds
    )
    names: list[str] = [] if args.wait else present(run.demo / "data", "train")
    plan = restrict(plan, names) if names else plan
    trainer = Backbone(run.twin, plan, options, run.log)
    at = trainer.at
    at.progress, at.step, at.tokens = args.progress, args.step, args.step * plan.tokens
    at.fresh_from = args.step
    if args.start is not None:
        # a machine that is gone took the position in the data along: not the same windows again
        at.seed += 1 + args.step
    state = run.out / "state.pt"
    if args.resume:
        trainer.restore(state)
    count = sum(p.numel() for p in run.twin.params.values())
    run.log("start", parameters=count, torch=torch.__version__, device=args.device,
            step=trainer.at.step, progress=trainer.at.progress)  # fmt: skip
    trainer.warm(plan.forms(trainer.at.progress, args.to))
    if args.wait:
        _wait(args.wait, 300)
        plan = restrict(plan, present(run.demo / "data", "train"))
    began = time.monotonic()
    trainer.use(run.batches("train", at.seed), plan, plan.forms(at.progress, args.to))
    heldout = run.batches("heldout", 12)
    run.log("data", sources=present(run.demo / "data", "train"),
            seconds=round(time.monotonic() - began, 1))  # fmt: skip
    pace = Pace(args.to, BEGAN + args.until, args.steps, args.stop_after)
    trainer.train(pace, state, lambda: _quietly(run, heldout, plan))
    run.log("backbone", **{k: v for k, v in vars(trainer.at).items() if k != "credit"})
    trainer.finish()
    run.validate(heldout, plan)
    run.export(drafts=False)
    if args.device == "cuda":
        run.log("memory", peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))


def _quietly(run: Run, heldout: Any, plan: Plan) -> None:
    """Validation in the midst of training: other shapes, so nothing compiled."""
    with evaluate.eager():
        run.validate(heldout, plan)


def drafts(run: Run, args: argparse.Namespace, plan: DraftPlan) -> None:
    """Trains the draft blocks on the exported backbone and exports both."""
    run.set_params(*filter(None, [args.start]), run.out / "checkpoint")
    checkpoint.round_params(run.twin.params)
    data = run.batches("train", 21)
    train_drafts(
        run.twin, data, plan, BEGAN + args.until, run.out / "drafts.pt", run.log,
        graph=args.graph, resume=args.resume, steps=args.steps,
    )  # fmt: skip
    checkpoint.round_params(run.twin.params)
    run.export(drafts=True)


STARTS = {
    "backbone": "a checkpoint in release layout to begin from",
    "drafts": "a checkpoint whose draft blocks are begun from; the backbone is OUT's",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    for name in ("backbone", "drafts"):
        one = commands.add_parser(name)
        one.add_argument("demo", type=pathlib.Path)
        one.add_argument("--out", type=pathlib.Path, required=True)
        one.add_argument("--config", type=pathlib.Path, help="instead of DEMO's config.json")
        one.add_argument("--start", type=pathlib.Path, help=STARTS[name])
        one.add_argument("--resume", action="store_true", help="continue the run in OUT")
        one.add_argument("--until", type=float, default=480, help="seconds after the start")
        one.add_argument("--steps", type=int, default=0, help="steps of the whole run, no clock")
        one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        one.add_argument("--rehearsal", action="store_true", help="small shapes")
        one.add_argument("--no-graph", dest="graph", action="store_false")
        one.add_argument("--no-compile", dest="compile", action="store_false")
    one = commands.choices["backbone"]
    one.add_argument("--to", type=float, default=1.0, help="progress at which the call ends")
    one.add_argument("--progress", type=float, default=0.0, help="progress of --start")
    one.add_argument("--step", type=int, default=0, help="steps of --start")
    one.add_argument("--stop-after", type=int, default=0, help="steps of this call at most")
    one.add_argument("--wait", type=pathlib.Path, help="file that appears with the data")
    one.add_argument("--log-every", type=int, default=50)
    one.add_argument("--save-seconds", type=float, default=60)
    one.add_argument("--eval-seconds", type=float, default=110)
    return result


def main() -> None:
    """Command line."""
    args = parser().parse_args()
    if args.command == "backbone" and args.start is None and (args.step or args.progress):
        sys.exit("--step and --progress tell where --start stood; give its folder, too")
    if args.device == "cpu":
        args.graph = args.compile = False
    else:
        # products in fp32 have bf16 values on one side: TF32 rounds the weights only
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    run = Run(args.demo, args.out, args.device, args.config)
    if args.command == "backbone":
        backbone(run, args, rehearsal.PLAN if args.rehearsal else Plan())
    else:
        drafts(run, args, rehearsal.DRAFT_PLAN if args.rehearsal else DraftPlan())


if __name__ == "__main__":
    main()
