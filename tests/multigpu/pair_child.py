"""One rank of the demo pack on a GPU. Run as `python pair_child.py RANK HOST:PORT MODE DEVICE`.

Modes of rank 0: "replies" and "eager" print the replies of a set of requests as JSON, "alone" and
"alone-eager" do so on one rank; every other mode generates until something ends it, a line a piece.
Eager modes record no graphs, on both ranks. Modes of rank 1 change one thing: "slots" and "version"
what it says it is, "raises" and "bits" what its model does in the 20th round.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from twinspark import LLM, Sampling
from twinspark.cli import main, ranks
from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine import ranks as engine_ranks
from twinspark.engine.rounds import Rounds
from twinspark.model.transformer import Transformer

SETTINGS = {
    "ranks": 2, "slots": 3, "max_context_tokens": 4096, "prefill_chunk": 96, "page_tokens": 16,
}  # fmt: skip
TEXTS = ("The capital of France is", "def add(a, b):", "Once upon a time there was")
LONG = "A list of numbers: " + " ".join(str(37 * n % 1000) for n in range(300))
TOKENS = 40


def replies(llm):
    """Token ids and log-probabilities of requests that use every part of the engine."""
    found = {}
    for temperature in (0.0, 0.9):
        free = Sampling(seed=7, max_tokens=TOKENS, temperature=temperature)
        serial = Sampling(seed=7, max_tokens=TOKENS, temperature=temperature, draft=False)
        alone = [ids(llm.generate(text, serial, reuse=False)) for text in TEXTS]
        found[f"serial {temperature}"] = alone
        drafted = [ids(llm.generate(text, free, reuse=False)) for text in TEXTS]
        together = [ids(reply) for reply in llm.generate_many(TEXTS, free)]
        again = [ids(llm.generate(text, free)) for text in TEXTS]  # on saved prefixes
        assert drafted == alone and together == alone and again == alone
    long = [LONG, *TEXTS[:2]]  # in pieces, beside decoding
    found["long"] = [ids(reply) for reply in llm.generate_many(long, free)]
    odd = Sampling(seed=3, max_tokens=TOKENS, temperature=0.8, frequency_penalty=0.4, logprobs=2)
    reply = llm.generate(TEXTS[0], odd, reuse=False)
    found["logprobs"] = [ids(reply), [score.logprob.hex() for score in reply.scores]]
    found["hits"] = llm.status.prefix_hits > 0
    return found


def ids(reply):
    return list(reply.token_ids)


def spoil(mode):
    """Change the 20th round of this rank, eager or recorded."""
    calls = []

    def strike(logits_TV):
        calls.append(1)
        if len(calls) == 20 and mode == "raises":
            raise RuntimeError("the device is on fire")
        if len(calls) == 20 and mode == "bits":
            logits_TV = logits_TV.clone()
            logits_TV.view(torch.int32)[0, 0] ^= 1
        return logits_TV

    run, forward = Rounds.run, Transformer.forward

    def run_spoiled(self, *given):
        return strike(run(self, *given))

    def forward_spoiled(self, step, caches):
        out = forward(self, step, caches)
        if not len(out.logits_RV):
            return out
        return type(out)(logits_RV=strike(out.logits_RV), rows=out.rows)

    Rounds.run, Transformer.forward = run_spoiled, forward_spoiled


def lead(address, mode, device):
    alone, eager = mode.startswith("alone"), mode.endswith("eager")
    settings = dict(SETTINGS, ranks=1) if alone else SETTINGS
    place = ranks.RankPlace(rank=0, rendezvous=None if alone else address)
    with LLM(None, rendezvous=place.address, device=device, **settings) as llm:
        rounds = llm.engine._runner._rounds
        assert (rounds is not None) == (device != "cpu" and not eager)
        if alone or eager or mode == "replies":
            print(json.dumps(replies(llm)), flush=True)
            return
        endless = Sampling(max_tokens=4000, ignore_eos=True, seed=3)
        while True:
            with llm.stream(TEXTS[0], endless, reuse=False) as stream:
                for _ in stream:
                    print("piece", flush=True)


if __name__ == "__main__":
    rank, address, mode, device = int(sys.argv[1]), *sys.argv[2:5]
    if mode == "version":
        engine_ranks.VERSION = "0.0.1"
    if mode.endswith("eager"):
        Rounds.of = staticmethod(lambda *_: None)
    if mode in ("raises", "bits"):
        spoil(mode)
    if rank == 0:
        main.run(lambda: lead(address, mode, device))
    else:
        place = ranks.RankPlace(rank=rank, rendezvous=address)
        changed = dict(SETTINGS, slots=2) if mode == "slots" else SETTINGS
        config = EngineConfig(device=device, **changed)
        main.run(
            lambda: ranks.follow(demo_pack_path(), config, place, verify=True, log_level="info")
        )
