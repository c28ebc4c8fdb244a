"""One rank of `twinspark bench pair` on CPUs, with a small model. Run: RANK HOST:PORT OUT.

What the command asks of a GPU is left out; how its ranks meet, measure and end is its own.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tests.tiny import config as tiny_config

from twinspark.bench import graphs, kernels, rank
from twinspark.bench.pair import PairPlan
from twinspark.cli import bench_pair, main, ranks

PLAN = PairPlan(rows=(1,), context=256, chunk=24, chunk_context=256, slots=(1,))


def small_rank(device, **given):
    made = build(device, config=tiny_config(), **given)
    made.model._is_placed = made.model._draft._is_placed = True
    return made


def few_calls(work, device, *, repeats):
    return time_calls(work, device, repeats=min(2, repeats))  # figures of nothing here


time_calls, graphs.time_calls = graphs.time_calls, few_calls
build, rank.build_rank = rank.build_rank, small_rank
kernels.device_facts = lambda: {"device": "none"}
torch.cuda.nccl.version = lambda: (2, 0, 0)
bench_pair._on = lambda _device: nullcontext()

if __name__ == "__main__":
    number, address, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    place = ranks.RankPlace(rank=number, rendezvous=address)
    parts = list(bench_pair.PARTS)
    if number == 0:
        main.run(lambda: bench_pair._lead("cpu", place, "small", parts, PLAN, [], out))
    else:
        main.run(lambda: bench_pair._follow("cpu", place, "small", parts, PLAN))
