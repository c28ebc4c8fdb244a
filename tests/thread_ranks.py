"""Ranks as threads of one process: a group for the model, and a follower for the engine.

Stands in for processes where a test needs many runs; tests/multiproc has the real ones.
"""

import queue
import threading
from contextlib import contextmanager

import torch

from twinspark.engine.runner import Runner
from twinspark.model.loading import load_model

WAIT_S = 60


class ThreadRank:
    """One rank of a group whose ranks are threads of this process."""

    def __init__(self, rank, size, board, barrier):
        self.rank, self.size = rank, size
        self._board, self._barrier = board, barrier
        self._rehearses = False

    def gather_shards(self, parts, *, widths=None):
        return [part for own in self._exchange(list(parts)) for part in own]

    def gather_stack(self, parts_S):
        return torch.cat(self._exchange(parts_S))

    def gather_ranks(self, tensor):
        return self._exchange(tensor)

    @contextmanager
    def rehearsal(self):
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def abort(self):
        """Let nobody wait for this rank any more."""
        self._barrier.abort()

    def _exchange(self, mine):
        if self._rehearses:
            return [mine] * self.size
        self._board[self.rank] = mine
        self._barrier.wait(WAIT_S)
        found = [self._board[rank] for rank in range(self.size)]
        self._barrier.wait(WAIT_S)
        return found


def thread_group(size):
    """The ranks of one group."""
    board, barrier = {}, threading.Barrier(size)
    return [ThreadRank(rank, size, board, barrier) for rank in range(size)]


def on_threads(groups, work):
    """Does `work(group)` for every group at once; results in their order, or what failed first."""
    found, problems = [None] * len(groups), []

    def run(group):
        try:
            found[group.rank] = work(group)
        except Exception as error:
            problems.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return found


def load_ranks(path, size, **settings):
    """A model's parts in rank order."""
    return [load_model(path, group=group, **settings) for group in thread_group(size)]


class ThreadFollowers:
    """Runs every plan on the other ranks' models, each in a thread of its own.

    Attributes:
        problem: what ended a follower, if anything did.
    """

    compares = True
    chooses = True

    def __init__(self, models, make_caches):
        """Take the models of ranks 1.. and how their caches are made."""
        self.problem = None
        self._queues = [queue.SimpleQueue() for _ in models]
        self._threads = [
            threading.Thread(target=self._follow, args=(model, make_caches(model), work))
            for model, work in zip(models, self._queues, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def step(self, plan):
        self._send(("step", plan))

    def draft(self, requests):
        self._send(("draft", list(requests)))

    def check(self, logits_RV):
        """Nothing is compared here."""

    def close(self):
        self._send(None)
        for thread in self._threads:
            thread.join(WAIT_S)
        assert self.problem is None, self.problem

    def _send(self, work):
        for each in self._queues:
            each.put(work)

    def _follow(self, model, caches, work):
        runner = Runner(model, caches)
        try:
            while (item := work.get()) is not None:
                kind, content = item
                if kind == "step":
                    runner.run(content)
                else:
                    runner.draft(content, None)
        except Exception as error:
            self.problem = error
            raise
