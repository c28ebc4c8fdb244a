"""Trains the demo model: backbone for a time, then the draft blocks on the frozen backbone.

    python -m tools.demo.train DEMO --out OUT --backbone-seconds 360 --draft-seconds 110

DEMO holds checkpoint/ and data/ as `data.py` leaves them. OUT receives the checkpoint in release
layout (files under 15 MB), log.jsonl and samples.json. `--device cpu --tiny` tries every step on
small shapes. Read next: `twin.py`, `train_draft.py`, `evaluate.py`.
"""

import argparse
import json
import pathlib
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tools.demo import checkpoint, evaluate, ops
from tools.demo.batches import MIX, Batches
from tools.demo.graphs import Captured
from tools.demo.init import initial
from tools.demo.optim import Optimizer
from tools.demo.train_draft import train_drafts
from tools.demo.twin import Twin
from torch import Tensor


class Run:
    """One training run: arguments, twin, data, log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        config = json.loads((args.demo / "checkpoint/config.json").read_text())
        token_map = torch.from_numpy(np.load(args.demo / "data/token_map.npy"))
        self.twin = Twin(config, token_map, args.device)
        self.train = Batches(args.demo / "data", "train", args.device, seed=11)
        self.heldout = Batches(args.demo / "data", "heldout", args.device, seed=12)
        self.tokenizer = Tokenizer.from_file(str(args.demo / "checkpoint/tokenizer.json"))
        if args.resume:
            params = checkpoint.from_release(checkpoint.load(args.resume), config["text_config"])
        else:
            params = initial(config)
        self.twin.params = {n: p.to(args.device).float() for n, p in params.items()}
        self.ids = torch.zeros((args.batch, args.length + 1), dtype=torch.int64, device=args.device)
        self.factor = torch.zeros((), device=args.device)
        self.log(
            "start", parameters=sum(p.numel() for p in params.values()), torch=torch.__version__
        )

    def log(self, kind: str, **values: Any) -> None:
        """One line to the terminal and to log.jsonl."""
        line = json.dumps({"t": round(time.monotonic() - self.began, 1), "kind": kind, **values})
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def loss(self, ids: Tensor, *, dense: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Cross entropy, index loss and router loads of windows [B, T+1]."""
        twin = self.twin
        state = twin.start(ids[:, :-1], dense=dense)
        h = twin.hidden(ids[:, :-1], state)
        logits = h @ twin.params["head.weight"].to(h.dtype).t()
        ce = ops.cross_entropy(logits, ids[:, 1:].flatten()).mean()
        return ce, torch.stack(state.index_losses).sum(), state.loads

    def step(self, optimizer: Optimizer, *, dense: bool) -> tuple[Tensor, Tensor, Tensor]:
        """One step on self.ids: cross entropy, index loss, AdamW gradient norm."""
        ce, index, loads = self.loss(self.ids, dense=dense)
        (ce + index).backward()
        norm = optimizer.step(self.factor)
        for layer, load in enumerate(loads):
            bias = self.twin.params[f"layers.{layer}.ffn.gate.bias"]
            bias += 2e-3 * self.factor * torch.sign(load.mean() - load)
        return ce.detach(), index.detach(), norm

    def feed(self, factor: float) -> None:
        """Puts the next batch and the rate factor where the step reads them."""
        self.ids.copy_(self.train.mixed(self.args.batch, self.args.length))
        self.factor.fill_(factor)

    def compile(self, optimizer: Optimizer) -> None:
        """Turns compilation on if a step with it works; else training stays eager."""
        if not self.args.compile:
            return
        torch._dynamo.config.recompile_limit = 64
        ops.switch.compiled = True
        began = time.monotonic()
        try:
            for dense in (True, False):
                self.feed(0.0)
                self.step(optimizer, dense=dense)
            if self.args.device == "cuda":
                torch.cuda.synchronize()
        except (RuntimeError, TypeError, AttributeError) as error:
            ops.switch.compiled = False
            self.log("compile_failed", error=repr(error)[:2000])
        self.log("compiled", on=ops.switch.compiled, seconds=round(time.monotonic() - began, 1))

    def profile(self, optimizer: Optimizer) -> None:
        """Prints where the GPU time of three steps goes."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for _ in range(3):
                self.feed(0.1)
                self.step(optimizer, dense=False)
            torch.cuda.synchronize()
        table = prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
        (self.out / "profile.txt").write_text(table)

    def seconds_left(self, until: float, seconds: float) -> float:
        """Seconds of a phase: to `until` after the start where given, else `seconds`."""
        return max(20.0, until - (time.monotonic() - self.began)) if until else seconds

    def backbone(self) -> None:
        """Trains every parameter but mtp.*; stops by the clock."""
        args = self.args
        names = [n for n in self.twin.params if not n.startswith("mtp.")]
        optimizer = Optimizer(self.twin.params, names)
        self.compile(optimizer)
        if args.profile:
            self.profile(optimizer)
        seconds = self.seconds_left(args.backbone_until, args.backbone_seconds)
        steps = {
            dense: Captured(partial(self.step, optimizer, dense=dense), enabled=args.graph)
            for dense in (True, False)
        }
        began, last, step, progress = time.monotonic(), time.monotonic(), 0, 0.0
        while progress < 1 and (args.steps == 0 or step < args.steps):
            factor = min(1.0, (step + 1) / 100) * max(0.01, min(1.0, (1 - progress) / 0.65))
            self.feed(factor)
            ce, index, norm = steps[progress < 0.12]()
            step += 1
            if step % args.log_every == 0:
                loss, now = ce.item(), time.monotonic()
                rate = args.log_every * args.batch * args.length / (now - last)
                last = now
                self.log("train", step=step, loss=round(loss, 4), index=round(index.item(), 4),
                         norm=round(norm.item(), 3), lr=round(factor, 3),
                         tokens_s=round(rate))  # fmt: skip
                if not loss < 50:
                    raise FloatingPointError(f"loss is {loss} at step {step}")
            if args.eval_every and step % args.eval_every == 0:
                self.validate()
                last = time.monotonic()
            progress = (time.monotonic() - began) / seconds
        for name in names:
            self.twin.params[name].requires_grad_(False)
        ops.switch.compiled = False
        seconds = round(time.monotonic() - began, 1)
        self.log(
            "backbone_done", step=step, tokens=step * args.batch * args.length, seconds=seconds
        )

    def validate(self) -> None:
        """Held-out losses, with compilation off (other shapes)."""
        on, ops.switch.compiled = ops.switch.compiled, False
        count = 2 if self.args.tiny else 8
        losses = evaluate.heldout_loss(self.twin, self.heldout, count, self.args.length)
        self.log("heldout", **losses)
        ops.switch.compiled = on

    def save(self, *, drafts: bool) -> None:
        """Writes the release-layout files."""
        tensors = checkpoint.to_release(self.twin.params, self.twin.text)
        parts = {"backbone": {n: t for n, t in tensors.items() if not n.startswith("mtp.")}}
        if drafts:
            parts["mtp"] = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
        for stem, part in parts.items():
            names = checkpoint.save(part, self.out, stem, limit=15_000_000)
            self.log("saved", files=names)

    def samples(self, count: int) -> None:
        """Greedy and sampled texts to samples.json."""
        rows = evaluate.prompts(self.tokenizer)
        result = {}
        for label, temperature in (("greedy", 0.0),):
            texts = evaluate.generate(self.twin, rows, count, temperature)
            cut = [t[: t.index(1, len(r)) + 1] if 1 in t[len(r) :] else t
                   for t, r in zip(texts, rows, strict=True)]  # fmt: skip
            result[label] = [self.tokenizer.decode(t, skip_special_tokens=False) for t in cut]
        text = json.dumps(result, indent=1, ensure_ascii=False)
        (self.out / "samples.json").write_text(text + "\n")
        for line in result["greedy"]:
            print(repr(line[:300]), flush=True)

    def acceptance(self, prompts: int, count: int) -> None:
        """Accepted drafts a round on greedy continuations of held-out beginnings."""
        end = self.tokenizer.token_to_id("</think>")
        for name in MIX:
            rows = evaluate.heldout_prompts(self.heldout, name, prompts, 64, end)
            texts = evaluate.generate(self.twin, rows, count)
            result = evaluate.acceptance(self.twin, texts, [len(r) for r in rows])
            self.log("acceptance", text=name, **result)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--resume", type=pathlib.Path, help="folder of a release-layout checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backbone-seconds", type=float, default=360)
    parser.add_argument("--draft-seconds", type=float, default=110)
    parser.add_argument("--backbone-until", type=float, default=0, help="seconds after the start")
    parser.add_argument("--draft-until", type=float, default=0, help="seconds after the start")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--steps", type=int, default=0, help="stop the backbone after so many steps"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--draft-sizes", type=int, nargs=4, default=[1600, 16, 2048, 256])
    parser.add_argument("--sample-tokens", type=int, default=128)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--no-graph", dest="graph", action="store_false")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="small shapes, a few steps")
    parser.add_argument("--probe", action="store_true", help="stop after the backbone's steps")
    args = parser.parse_args()
    args.graph = args.graph and args.device == "cuda"
    if args.tiny:
        args.batch, args.length, args.draft_sizes = 2, 128, [4, 2, 128, 8]
        args.log_every, args.eval_every = 1, 0
    torch.manual_seed(0)
    run = Run(args)
    if args.backbone_seconds > 0:
        run.backbone()
    if args.probe:
        return
    checkpoint.round_params(run.twin.params)
    run.validate()
    run.save(drafts=False)
    seconds = run.seconds_left(args.draft_until, args.draft_seconds)
    sizes = tuple(args.draft_sizes)
    train_drafts(run.twin, run.train, seconds, sizes, run.log, graph=args.graph)
    checkpoint.round_params(run.twin.params)
    run.save(drafts=True)
    run.samples(8 if args.tiny else args.sample_tokens)
    run.acceptance(2 if args.tiny else 12, 16 if args.tiny else args.sample_tokens)
    if args.device == "cuda":
        run.log("end", peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))


if __name__ == "__main__":
    main()
