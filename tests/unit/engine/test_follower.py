"""Leader and follower on the fake model: the follower decides nothing and ends up the same."""

import pytest
from tests.fake_model import FakeModel, run_all

from twinspark.config.engine import EngineConfig
from twinspark.distributed.digest import DigestBook
from twinspark.distributed.fate import RankMemory
from twinspark.distributed.frames import Frame, FrameKind, parse_frame
from twinspark.engine.core import Engine, new_caches
from twinspark.engine.follower import Obeys, obey
from twinspark.engine.leader import RankLeader, RanksMemory
from twinspark.engine.runner import Runner
from twinspark.errors import FormatError, RankFailed

SETTINGS = {"slots": 3, "prefill_chunk": 7, "max_context_tokens": 256, "page_tokens": 16}


class FollowingModel(FakeModel):
    """On a following rank nothing is drafted, but the pass is run."""

    def draft(self, requests, caches, pick):
        if pick is not None:
            return super().draft(requests, caches, pick)
        super().draft(requests, caches, lambda n, j, logits_V: int(logits_V.argmax()))
        return []


class Tape:
    """Stands for a team: keeps what rank 0 sends, and its digests."""

    def __init__(self):
        self.frames, self.digests, self.memory = [], {}, []

    def check(self):
        """Nobody fails."""

    def send(self, frame):
        data = frame.pack()
        self.frames.append(parse_frame(data))
        return data

    def compare(self, number, digest):
        self.digests[number] = digest

    def receive(self):
        return self.frames.pop(0)


@pytest.fixture
def recorded(small_tokenizer, make_request):
    """A tape of a run of several requests, and the states of rank 0's caches at its end."""
    tape = Tape()
    config = EngineConfig(**SETTINGS)
    model = FollowingModel()
    engine = Engine(model, small_tokenizer, config, followers=RankLeader(tape))
    replies = run_all(engine, [make_request(n, max_tokens=40) for n in range(9)])
    assert len(replies.last) == 9
    tape.frames.append(Frame(kind=FrameKind.HALT))
    return tape, engine._runner.caches, model


def follow(tape, model):
    digests = {}
    follows = Obeys(digests.__setitem__)
    runner = Runner(model, new_caches(model, EngineConfig(**SETTINGS)), followers=follows)
    obey(tape, runner, follows)
    return digests, runner.caches


def test_a_follower_does_what_rank_0_does(recorded):
    tape, caches, leader = recorded
    model = FollowingModel()
    digests, found = follow(tape, model)
    assert digests == tape.digests
    assert list(digests) == list(range(15, 16 * len(digests), 16)) and len(digests) > 2
    assert model.calls == leader.calls and model.draft_calls == leader.draft_calls > 0
    assert vars(found) == vars(caches)
    assert not tape.frames


def test_one_other_bit_shows_at_the_next_comparison(recorded):
    tape, _, _ = recorded

    class Other(FollowingModel):
        def logits(self, state):
            logits_V = super().logits(state)
            if len(self.calls) == 20:
                logits_V.view("uint32")[3] ^= 1
            return logits_V

    digests, _ = follow(tape, Other())
    assert digests[15] == tape.digests[15]
    assert all(digests[number] != tape.digests[number] for number in digests if number > 15)
    book = DigestBook()
    assert book.add_own(31, tape.digests[31]) is None
    assert "rank 1 fell out of step: after round 31" in book.add(1, 31, digests[31])


def test_a_lost_or_doubled_frame_shows_too(recorded):
    tape, _, _ = recorded
    drafts = [n for n, frame in enumerate(tape.frames) if frame.kind == FrameKind.DRAFT]
    tape.frames.insert(drafts[0], tape.frames[drafts[0]])
    digests, _ = follow(tape, FollowingModel())
    assert digests[15] != tape.digests[15]


def test_a_follower_ends_on_what_it_cannot_run(recorded):
    tape, _, _ = recorded
    tape.frames.insert(5, Frame(kind=FrameKind.STEP, counts=(1, 0, 0)))
    with pytest.raises(FormatError, match="too few for its 1 entries"):
        follow(tape, FollowingModel())


def test_a_rank_that_is_gone_ends_the_engine(small_tokenizer, make_request):
    class Gone(Tape):
        def send(self, frame):
            if len(self.frames) == 9:
                raise RankFailed("rank 1 is gone: its process was killed by SIGKILL")
            return super().send(frame)

    config = EngineConfig(**SETTINGS)
    engine = Engine(FollowingModel(), small_tokenizer, config, followers=RankLeader(Gone()))
    with pytest.raises(RankFailed, match="rank 1 is gone"):
        run_all(engine, [make_request(n) for n in range(4)])
    failed = engine.fail_all("rank 1 is gone", code="engine_ended")
    assert {event.kind for event in failed} == {"engine"} and len(failed) == 4


def test_memory_that_is_too_old_is_unknown():
    tape = Tape()
    tape.memory = [
        RankMemory(usable_bytes=5, age_s=0.0),
        RankMemory(usable_bytes=7, age_s=0.6),
        RankMemory(usable_bytes=9, age_s=2.1),
        RankMemory(usable_bytes=None, age_s=0.1),
    ]
    assert RanksMemory(tape).usable() == [5, 7, None, None]
