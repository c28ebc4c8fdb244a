"""Checks the twin against golden float64 data of the TINY configuration.

    python -m tools.demo.check_golden TOOLS_DIR GOLDEN.safetensors

TOOLS_DIR holds tiny_weights.py. Prints the largest difference of logits, streams, draft logits
and confidences for each prompt length. Read next: `twin.py`.
"""

import argparse
import importlib
import sys

import torch
from safetensors.torch import load_file
from tools.demo.checkpoint import from_release
from tools.demo.draft import draft_greedy
from tools.demo.twin import State, Twin


def tiny_twin(weights: object) -> Twin:
    """The twin on TINY weights, all float64."""
    w: object = weights
    config = w.CONFIG  # type: ignore[attr-defined]
    tensors = {
        t.name: torch.from_numpy(w.values(t)).double()  # type: ignore[attr-defined]
        for t in w.tensors(config)  # type: ignore[attr-defined]
    }
    token_map = torch.tensor([w.token_map(i) for i in range(512)])  # type: ignore[attr-defined]
    twin = Twin(config, token_map)
    twin.params = from_release(tensors, config["text_config"])
    return twin


def compare_drafts(
    twin: Twin, full: torch.Tensor, n: int, state: State, golden: dict[str, torch.Tensor]
) -> str:
    """Differences of the 24 draft passes after an n-token prompt."""
    starts = torch.arange(n + 1, n + 25)[None]
    drafts, rows, sure = draft_greedy(twin, twin.padded(full), starts, state)
    prefix = f"f64.p{n}.draft_"
    same = torch.equal(drafts, golden[prefix + "ids"][:, 1:].long())
    conf = (sure - golden[prefix + "confidence"]).abs().max().item()
    logits = ""
    if prefix + "logits" in golden:
        logits = f"logits {(rows - golden[prefix + 'logits']).abs().max().item():.2e} "
    return f"{logits}ids {'equal' if same else 'DIFFER'} confidence {conf:.2e}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools")
    parser.add_argument("golden")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[1, 2, 15, 16, 17, 33, 64, 80, 128]
    )
    args = parser.parse_args()
    sys.path.insert(0, args.tools)
    twin = tiny_twin(importlib.import_module("tiny_weights"))
    golden = load_file(args.golden)
    for n in args.lengths:
        ids = golden[f"p{n}.ids"].long()[None]
        want = golden[f"f64.p{n}.logits"].double()
        got, state = twin.logits(ids, exact=True)
        prefill = (got[0] - want).abs().max().item()
        steps = golden[f"f64.p{n}.decode_tokens"].long()
        full = torch.cat((ids, steps[None]), 1)
        got, state = twin.logits(full, exact=True)
        decode = (got[0, n : n + 24] - golden[f"f64.p{n}.decode_logits"]).abs().max().item()
        line = f"p{n}: prefill {prefill:.2e} decode {decode:.2e}"
        if f"f64.p{n}.draft_ids" in golden:
            line += " draft " + compare_drafts(twin, full, n, state, golden)
        print(line)


if __name__ == "__main__":
    main()
