"""The steps of the training on a lent GPU: what they carry, what they repeat, what they give up."""

import argparse
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tools.demo import expedition
from tools.demo.checkpoint import from_release, load, save
from tools.demo.curriculum import WARMUP_STEPS, rate_factor
from tools.demo.expedition import Expedition, collect
from tools.demo.packs import decode, twin_params
from tools.demo.train import Run, _wait

from twinspark.config.paths import demo_pack_path
from twinspark.pack.reader import open_pack


def made(tmp_path, **more):
    args = argparse.Namespace(
        demo=tmp_path / "demo", work=tmp_path / "work", out=tmp_path / "out", carry=None,
        start=None, seconds=100.0, widths="mix,3", device="cpu", graph=False, compile=False,
        rehearsal=True,
    )  # fmt: skip
    vars(args).update(more)
    return Expedition(args)


def test_large_files_travel_in_parts_and_come_together_again(tmp_path, monkeypatch):
    monkeypatch.setattr(expedition, "PART_BYTES", 1000)
    step = made(tmp_path)
    pack = step.work / "packs" / "mix"
    pack.mkdir(parents=True)
    data = bytes(range(256)) * 50  # 13 parts: more than nine, so their order is by number
    (pack / "model.safetensors").write_bytes(data)
    (pack / "config.json").write_text("{}")
    step.carry_away([pack / "model.safetensors", pack / "config.json"])
    assert max(p.stat().st_size for p in step.out.iterdir()) <= 1000
    collect([step.out], tmp_path / "all")
    assert (tmp_path / "all" / "mix.model.safetensors").read_bytes() == data
    assert (tmp_path / "all" / "mix.config.json").read_text() == "{}"


def test_packs_travel_with_what_their_weights_are_checked_by(tmp_path):
    step = made(tmp_path)
    for width in ("mix", "3"):
        pack = step.work / "packs" / width
        pack.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "twinspark.json"):
            (pack / name).write_text(f"{name} of {width}")
    step.packs()
    collect([step.out], tmp_path / "all")
    for name in ("model.safetensors", "config.json", "twinspark.json"):
        assert (tmp_path / "all" / f"3.{name}").read_text() == f"{name} of 3"


def test_a_result_is_made_once_and_a_failure_costs_only_itself(tmp_path):
    step, calls = made(tmp_path), []

    def good():
        calls.append(1)
        return {"value": 3}

    def bad():
        raise ValueError("no such text")

    step.once("bad.json", bad)
    step.once("good.json", good)
    step.once("good.json", good)
    assert len(calls) == 1
    step.results()
    kept = json.loads((step.out / "results.json").read_text())
    assert kept == {"good": {"value": 3}}
    assert "no such text" in (step.out / "log.jsonl").read_text()


def test_the_config_of_the_run_is_settled_once(tmp_path):
    step = made(tmp_path)
    (step.demo / "checkpoint").mkdir(parents=True)
    (step.demo / "checkpoint/config.json").write_text('{"a": 1}')
    step.settle_config()
    (step.demo / "checkpoint/config.json").write_text('{"a": 2}')  # unpacked meanwhile
    step.settle_config()
    assert (step.work / "config.json").read_text() == '{"a": 1}'


def test_c_without_a_backbone_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="run B first"):
        made(tmp_path).finish()


def test_a_failing_module_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"tools\.demo\.curves ended with"):
        made(tmp_path).python("curves", str(tmp_path / "none"), str(tmp_path))


def test_training_that_breaks_off_goes_on_without_graphs(tmp_path, monkeypatch):
    step, calls = made(tmp_path), []

    def train(command, until, *more):
        calls.append((float(until), more))
        if len(calls) == 1:
            (step.work / "state.pt").touch()
            raise RuntimeError("ended with -9")

    monkeypatch.setattr(step, "train", train)
    step.survive("backbone", lambda: 90.0, step.work / "state.pt", "--to", "1")
    assert calls == [(90.0, ("--to", "1")), (90.0, ("--to", "1", "--resume", "--no-graph"))]
    calls.clear()
    with pytest.raises(RuntimeError, match="-9"):  # too late for another try
        step.survive("backbone", lambda: 50.0, step.work / "state.pt")
    assert len(calls) == 1


def test_an_edition_that_goes_on_from_another_begins_at_the_full_rate(tmp_path, monkeypatch):
    calls = []
    for more in ({}, {"start": tmp_path / "start"}):
        step = made(tmp_path, **more)
        step.note("test")
        monkeypatch.setattr(step, "settle_config", lambda: None)
        monkeypatch.setattr(step, "train", lambda command, until, *flags: calls.append(flags))
        step.backbone("A")
    assert calls[0] == ("--to", "0.42")
    where = ("--start", str(tmp_path / "start"))
    assert calls[1] == ("--to", "0.7", *where, "--progress", "0.4")
    assert rate_factor(WARMUP_STEPS, expedition.BEGIN) == 1.0
    assert rate_factor(WARMUP_STEPS, expedition.BEGIN + 0.01) < 1.0


def test_draft_blocks_go_on_and_the_backbone_is_the_new_one(tmp_path):
    pack = open_pack(demo_pack_path())
    decode(pack, tmp_path / "start")
    own = twin_params(pack)
    text = dict(pack.config_json["text_config"])
    kept = from_release(load(tmp_path / "start"), text)
    assert kept.keys() == own.keys()
    table = "engram.embed.weight"  # stored in 8 bits by the pack, so nothing is lost
    for name, value in own.items():
        same = value if name.endswith(("gate.bias", table)) else value.bfloat16()
        assert torch.equal(kept[name].float(), same.float()), name
    (tmp_path / "out/checkpoint").mkdir(parents=True)
    (tmp_path / "demo/data").mkdir(parents=True)
    new = {n: t for n, t in load(tmp_path / "start").items() if not n.startswith("mtp.")}
    new["norm.weight"] = torch.full_like(new["norm.weight"], 3)
    save(new, tmp_path / "out/checkpoint", "backbone", limit=2**31)
    np.save(tmp_path / "demo/data/token_map.npy", np.zeros(4096, np.int64))
    run = Run(tmp_path / "demo", tmp_path / "out", "cpu", demo_pack_path() / "config.json")
    run.set_params(tmp_path / "start", tmp_path / "out/checkpoint")
    assert (run.twin.params["norm.weight"] == 3).all()
    block = next(n for n in own if n.startswith("mtp.") and n.endswith("wq_a.weight"))
    assert torch.equal(run.twin.params[block], kept[block].float())


def test_a_calibration_that_takes_too_long_is_done_without(tmp_path, monkeypatch):
    step = made(tmp_path)
    monkeypatch.setattr(step, "left", lambda: 0.0)
    waited = []

    class Slow(subprocess.Popen):
        def wait(self, timeout=None):
            waited.append(timeout)
            return super().wait(None if timeout is None else 0.2)

    child = Slow([sys.executable, "-c", "import time; time.sleep(60)"])
    step.await_calibration(child)
    assert waited[0] == 20.0 and child.returncode == -9
    assert '"calibration"' in (step.work / "log.jsonl").read_text()


def test_unpacking_that_fails_is_told_to_the_trainer(tmp_path):
    carry = tmp_path / "carry"
    (carry / "head" / "data").mkdir(parents=True)
    step = made(tmp_path, carry=carry)  # no carry.json: unpacking cannot work
    assert step.unpack().wait() != 0
    with pytest.raises(RuntimeError, match="unpacking failed"):
        _wait(step.demo / "data" / "ready", 30)


def test_calibration_survives_the_disk(tmp_path):
    from tools.demo.packs import load_calibration, save_calibration

    from twinspark.quantize.calibrate import Calibration
    from twinspark.quantize.hessian import Hessian

    moment = torch.eye(4) * 2
    found = Calibration({"head": Hessian(moment, 7)}, {"head": 7}, 12, 3)
    save_calibration(found, tmp_path / "h.pt")
    back = load_calibration(tmp_path / "h.pt")
    assert torch.equal(back.hessians["head"].moment_KK, moment)
    assert (back.rows, back.tokens, back.sequences) == ({"head": 7}, 12, 3)
