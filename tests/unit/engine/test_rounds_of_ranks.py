"""Recorded rounds on two ranks, which are threads: they meet in replays only, and agree.

The leader chooses tokens and drafts by rules, the follower runs what it is sent: their recordings
differ in kind, in number and in time. Rows are placed on the CPU as in test_rounds.py.
"""

import queue
import threading
from dataclasses import replace
from time import perf_counter, sleep

import pytest
import torch
from tests import tiny
from tests.thread_ranks import load_ranks
from tests.unit.engine.test_rounds import (
    TOKEN_MAP,
    TOKENIZER,
    Again,
    Recorder,
    make_engine,
    replies,
    request,
)

from twinspark.config.engine import EngineConfig
from twinspark.distributed.digest import DigestBook
from twinspark.distributed.frames import Frame, FrameKind, parse_frame
from twinspark.engine.core import Engine, new_caches
from twinspark.engine.follower import Obeys, obey
from twinspark.engine.leader import RankLeader
from twinspark.engine.rounds import Rounds
from twinspark.engine.row_digests import odd_numbers, row_digests
from twinspark.engine.runner import Runner
from twinspark.errors import RankFailed
from twinspark.model.loading import load_model
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import PackWeights

SETTINGS = {
    "max_context_tokens": 112, "page_tokens": 16, "prefill_chunk": 24, "slots": 3, "lookup": False,
    "ranks": 2,
}  # fmt: skip


class Rehearsing:
    """Records as `recording.Graphs` does: what goes before the first replay asks no other rank."""

    def __init__(self, model):
        self.model, self.made = model, []

    def record(self, work):
        again = Again(work)
        with self.model.rehearsal():
            work()
        self.made.append(again)
        return again


class ThreadTeam:
    """A team of two: frames go to a thread that follows."""

    memory = ()

    def __init__(self):
        self.frames, self.book = queue.SimpleQueue(), DigestBook()
        self.compared, self.problems, self.failure = [], [], None

    def check(self):
        if self.failure is not None:
            raise self.failure

    def send(self, frame):
        data = frame.pack()
        self.frames.put(data)
        return data

    def receive(self):
        return parse_frame(self.frames.get(timeout=60))

    def compare(self, number, digest):
        self.compared.append(number)
        self.note(self.book.add_own(number, digest))

    def send_digest(self, number, digest):
        self.note(self.book.add(1, number, digest))

    def note(self, problem):
        if problem:
            self.problems.append(problem)


@pytest.fixture(scope="module")
def parts():
    """TINY in float64 with placed rows and a Markov head that walks alone, on two ranks."""
    models = load_ranks(tiny.plain_path(), 2, token_map=TOKEN_MAP, dtype=torch.float64)
    return [placed(model) for model in models]


def placed(model):
    name = f"mtp.{model.config.num_nextn_predict_layers - 1}.markov_head.head.weight"
    model._is_placed = model._draft._is_placed = True
    model._draft._markov_head_VR = PackWeights(open_pack(tiny.plain_path())).plain(name).double()
    return model


class Pair:
    """An engine on two ranks."""

    def __init__(self, parts, *, spoil=None, clock=perf_counter):
        config, self.team = EngineConfig(**SETTINGS), ThreadTeam()
        follows = Obeys(self.team.send_digest)
        runner = Runner(parts[1], new_caches(parts[1], config), followers=follows)
        self.follows = Rehearsing(parts[1])
        runner._rounds = Rounds(parts[1], runner.caches, recorder=self.follows)
        if spoil is not None:
            spoil(runner._rounds)
        self.following = runner
        self.engine = Engine(
            parts[0], TOKENIZER, config, followers=RankLeader(self.team), clock=clock
        )
        own, banned_V = self.engine._runner, self.engine._sampler.banned_V
        self.leads = Rehearsing(parts[0])
        own._rounds = Rounds(parts[0], own.caches, banned_V=banned_V, recorder=self.leads)
        self.error = None
        self.thread = threading.Thread(target=self.follow, args=(runner, follows))
        self.thread.start()

    def follow(self, runner, follows):
        try:
            obey(self.team, runner, follows)
        except Exception as error:
            self.error = error

    def close(self):
        self.team.send(Frame(kind=FrameKind.HALT))
        self.thread.join(60)
        assert self.error is None, self.error
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def requests():
    """Rules and no rules: the first draft passes are chosen here, others by the host."""
    odd = {"frequency_penalty": 0.5, "temperature": 0.7}
    return [request(0, temperature=0.8), request(1, **odd), request(2)]


@pytest.fixture(scope="module")
def wanted(requests):
    """What one rank gives."""
    alone = placed(load_model(tiny.plain_path(), token_map=TOKEN_MAP, dtype=torch.float64))
    return replies(make_engine(alone, Recorder(), slots=3, lookup=False), *requests)


def test_two_ranks_give_the_replies_of_one_though_they_record_apart(parts, requests, wanted):
    pair = Pair(parts)
    try:
        for alone in requests:  # blocks of one request, by rules and by the host
            assert replies(pair.engine, alone) == {alone.request_id: wanted[alone.request_id]}
        assert replies(pair.engine, *requests) == wanted
    finally:
        pair.close()
    kinds = {key[0] for key in pair.engine._runner._rounds.recorded}
    assert kinds == {"decode", "draft", "draft by rules"}
    assert len(pair.leads.made) > len(pair.follows.made) > 3
    assert not pair.team.problems and len(pair.team.compared) > 1


def test_one_other_bit_of_a_recorded_round_shows(parts, requests):
    def spoil(rounds):
        digests, seen = rounds.digests, []

        def spoiled(logits_TV):
            seen.append(1)
            if len(seen) == 5:
                logits_TV = logits_TV.clone()
                logits_TV.view(torch.int64)[0, 17] ^= 1
            return digests(logits_TV)

        rounds.digests = spoiled

    pair = Pair(parts, spoil=spoil)
    try:
        replies(pair.engine, *requests)
    finally:
        pair.close()
    assert pair.team.problems and "rank 1 fell out of step" in pair.team.problems[0]


def test_what_was_computed_after_a_rank_was_lost_is_told_to_nobody(parts, requests):
    """A GPU that is let go by an abort gives whatever it has; no token may come of it."""
    pair = Pair(parts)
    failure = RankFailed("rank 1 is gone: its process was killed by SIGKILL")
    try:
        for asked in requests:
            pair.engine.submit(asked)
        for _ in range(12):
            pair.engine.step()
        run = pair.engine._runner._rounds.run

        def lost(*args):
            found = run(*args)
            pair.team.failure = failure
            return found

        pair.engine._runner._rounds.run = lost
        with pytest.raises(RankFailed, match="rank 1 is gone"):
            while pair.engine.has_work:  # not every plan has a round
                pair.engine.step()
    finally:
        pair.close()


def test_ranks_that_become_idle_hold_nothing_of_a_piece(parts, requests, wanted):
    """Both give it up before the next request comes, and they still agree."""
    pair = Pair(parts, clock=lambda: 0.0)
    partial = pair.engine._runner._partial
    try:
        pair.engine.submit(replace(requests[0], request_id="stream"))
        for _ in range(5):
            pair.engine.step()
        pair.engine.submit(replace(requests[2], request_id="prompt"))
        while partial._begun is None:
            pair.engine.step()
        for name in ("stream", "prompt"):
            pair.engine.cancel(name)
        while pair.engine.has_work:
            pair.engine.step()
        assert partial._begun is None
        until_s = perf_counter() + 60
        while pair.following._partial._begun is not None and perf_counter() < until_s:
            sleep(0.01)  # the other thread runs what it was sent
        assert pair.following._partial._begun is None
        assert replies(pair.engine, *requests) == wanted
    finally:
        pair.close()
    assert not pair.team.problems and len(pair.team.compared) > 1


def test_every_single_bit_of_a_row_counts():
    odd_V = odd_numbers(50, torch.device("cpu"))
    assert bool((odd_V & 1).all()) and len(set(odd_V.tolist())) == 50
    logits_TV = torch.randn(3, 50)
    found = row_digests(logits_TV, odd_V)
    assert found.dtype == torch.int64 and len(set(found.tolist())) == 3
    for bit in range(32):
        other = logits_TV.clone()
        other.view(torch.int32)[1, 2 * bit % 50] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert (row_digests(other, odd_V) == found).tolist() == [True, False, True]
    swapped = logits_TV.clone()
    swapped[1, [3, 4]] = logits_TV[1, [4, 3]]
    assert row_digests(swapped, odd_V)[1] != found[1]
