"""One rank as a process. Run as `python rank_child.py PACK RANK HOST:PORT MODE`.

Rank 0 generates until something ends it; every token it gives is a line of stdout. Modes change
one thing: "slots" and "version" what the rank says it is, "raises" and "bits" what its model does
in the 20th forward pass.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from twinspark import LLM, Sampling
from twinspark.cli import main, ranks
from twinspark.config.engine import EngineConfig
from twinspark.engine import ranks as engine_ranks
from twinspark.model.transformer import Transformer

SETTINGS = {"ranks": 2, "max_context_tokens": 4096, "page_tokens": 16, "slots": 2}


def spoil_forward(mode):
    forward, calls = Transformer.forward, []

    def spoiled(self, step, caches):
        calls.append(step)
        if len(calls) == 20 and mode == "raises":
            raise RuntimeError("the device is on fire")
        out = forward(self, step, caches)
        if len(calls) == 20 and mode == "bits":
            bits = out.logits_RV.clone()
            bits.view(-1).view(dtype=bits.dtype)[0] += 2**-16
            return dataclasses.replace(out, logits_RV=bits)
        return out

    Transformer.forward = spoiled


def lead(path, place, settings):
    with LLM(path, rendezvous=place.address, **settings) as llm:
        sampling = Sampling(max_tokens=4000, ignore_eos=True, seed=3)
        with llm.stream("ab", sampling) as stream:
            for _ in stream:
                print("piece", flush=True)


if __name__ == "__main__":
    path, rank, rendezvous, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    place = ranks.RankPlace(rank=rank, rendezvous=rendezvous)
    settings = dict(SETTINGS, slots=3) if mode == "slots" else SETTINGS
    if mode == "version":
        engine_ranks.VERSION = "0.0.1"
    spoil_forward(mode)
    if rank == 0:
        main.run(lambda: lead(path, place, settings))
    else:
        config = EngineConfig(**settings)
        main.run(lambda: ranks.follow(path, config, place, verify=True, log_level="info"))
