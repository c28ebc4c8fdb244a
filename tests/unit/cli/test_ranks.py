"""Flags of ranks: what fits together, and what a failed rank ends with."""

import subprocess
import sys

import pytest

from twinspark.cli.ranks import RankPlace, rank_place
from twinspark.config.engine import EngineConfig
from twinspark.errors import ConfigError

TWO = EngineConfig(ranks=2)


def test_places():
    assert rank_place(None, None, EngineConfig()) == RankPlace()
    assert rank_place(None, "h:1", TWO) == RankPlace(rank=0, rendezvous="h:1")
    assert rank_place(1, "h:1", TWO).address == ("h", 1)
    assert RankPlace().address is None


@pytest.mark.parametrize(
    ("rank", "rendezvous", "config", "message"),
    [
        (1, None, TWO, "--rank needs --rendezvous"),
        (None, "h:1", EngineConfig(), "give --tp 2 or 4 too"),
        (2, "h:1", TWO, "--rank is 2, expected 0 to 1"),
        (-1, "h:1", TWO, "--rank is -1, expected 0 to 1"),
        (1, "h", TWO, "expected HOST:PORT"),
    ],
)
def test_flags_that_do_not_fit(rank, rendezvous, config, message):
    with pytest.raises(ConfigError, match=message):
        rank_place(rank, rendezvous, config)


def test_a_failed_rank_ends_the_program_with_70():
    """By the short way out: what is written before is not lost."""
    code = (
        "from twinspark.cli import main\n"
        "from twinspark.errors import RankFailed\n"
        "def command():\n"
        "    print('half a reply', end='')\n"
        "    raise RankFailed('rank 1 is gone: it was unplugged')\n"
        "main.run(command)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 70
    assert done.stdout == "half a reply"
    assert done.stderr == "twinspark: rank 1 is gone: it was unplugged\n"
