"""Pairs of processes on two GPUs; PAIR_DEVICES=cpu,cpu tries the tests themselves without any.

PAIR_TIMES names a file that `note` adds seconds to, a line of JSON each.
"""

import json
import os
from pathlib import Path
from time import monotonic

from tests.lost_ranks import SOON_S
from tests.rank_process import RankProcess, free_address

CHILD = Path(__file__).with_name("pair_child.py")
DEVICES = tuple(os.environ.get("PAIR_DEVICES", "cuda:0,cuda:1").split(","))
ON_GPUS = DEVICES[0] != "cpu"
READY_S = 240  # both ranks load and compile
SLACK_S = 0.5 if ON_GPUS else 5.0  # where two cores are shared by all tests


class Pairs:
    """Starts ranks, which are ended whatever happens."""

    def __init__(self):
        self._started = []

    def __call__(self, mode="well", *, zero=None, devices=DEVICES):
        """Rank 0 and rank 1; `mode` is rank 1's, and rank 0's too unless `zero` says otherwise."""
        address = free_address()
        return [
            self._start(0, address, zero or mode, devices[0]),
            self._start(1, address, mode, devices[1]),
        ]

    def alone(self, mode):
        """One rank, on the first device."""
        return self._start(0, "none", mode, DEVICES[0])

    def _start(self, rank, address, mode, device):
        self._started.append(RankProcess(CHILD, rank, address, mode, device))
        return self._started[-1]

    def close(self):
        for process in self._started:
            process.close()


def replies_of(process):
    """What rank 0 printed, after its orderly end."""
    code, said = process.end(2 * READY_S)
    assert code == 0, said
    return json.loads(process.out[-1])


def note(what, begin):
    """Seconds since then, which are few; kept for a result file."""
    seconds = monotonic() - begin
    if path := os.environ.get("PAIR_TIMES"):
        with open(path, "a") as file:
            file.write(json.dumps({"what": what, "seconds": round(seconds, 3)}) + "\n")
    assert seconds < SOON_S + SLACK_S, what
