"""Ranks as processes: the bits of one rank, through the engine and the command line (I10)."""

import subprocess
import sys

import pytest
from tests.rank_packs import FOUR_UNEVEN, whole_pack

from twinspark import LLM, Sampling
from twinspark.cli import logits

SETTINGS = {
    "max_context_tokens": 256, "page_tokens": 16, "prefill_chunk": 24, "slots": 3,
    "rank_timeout_s": 60.0,
}  # fmt: skip
PROMPTS = ["ab" * 20, "x", "ab" * 20 + "c", "the quick brown fox " * 4, "ab" * 20]
RULES = [
    Sampling(temperature=rule, max_tokens=6, seed=n, ignore_eos=True)
    for n, rule in enumerate((0.0, 0.9, 0.7, 1.0, 0.0))
]


def replies(path, **settings):
    with LLM(path, **SETTINGS, **settings) as llm:
        first = [r.token_ids for r in llm.generate_many(PROMPTS, RULES)]
        again = [r.token_ids for r in llm.generate_many(PROMPTS[:2], RULES[:2])]
        team = llm._loaded.team
        if team is not None:
            memory = team.memory
            assert len(memory) == team.size and all(m.usable_bytes for m in memory)
            assert all(m.age_s < 30 for m in memory)
        reused = llm.status.prefix_hits
    if team is not None:
        assert [team._children.how_ended(rank) for rank in team._children.ranks] == [
            "its process ended with exit code 0; its last words are in the log"
        ] * (team.size - 1)
    assert again == first[:2]
    return first, reused


@pytest.mark.parametrize(("kind", "split_pool"), [("exl3", False), ("plain", True)])
def test_two_processes_give_the_replies_of_one(kind, split_pool):
    """Drafts on, several requests a round, pieces, reused prefixes; then an orderly end."""
    path = whole_pack(kind)
    alone, reused = replies(path)
    assert reused > 0
    assert replies(path, ranks=2, split_pool=split_pool)[0] == alone


IDS = ",".join(str((n * 37) % 300 + 20) for n in range(40))


def logits_of(path, out, tp, **options):
    """The file that `twinspark logits` writes, on this process and then on several."""
    options = {"chunk": 16, "prefill": "full", "virtual_shards": 2, **options}
    logits.logits(path, IDS, out, **options)
    alone = out.read_bytes()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "twinspark", "logits", str(path), "--ids", IDS]
    done = subprocess.run(
        [*command, "--out", str(out), "--tp", str(tp), *flags],
        stderr=subprocess.PIPE, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return alone, out.read_bytes()


def test_the_logits_command_on_two_and_four_ranks(tmp_path):
    alone, two = logits_of(whole_pack("exl3"), tmp_path / "two", 2, prefill="cone")
    assert two == alone
    path = whole_pack("plain", **FOUR_UNEVEN)
    alone, four = logits_of(path, tmp_path / "four", 4, virtual_shards=4)
    assert four == alone
