"""Ranks: shards of two ranks in two threads give the bits of one rank (design D17, I10)."""

import threading

import pytest
import torch
from tests import tiny
from tests.unit.model.harness import Session, assert_same, prompt, tiny_token_map

from twinspark.distributed.collectives import SingleRank, own_shards, sum_shards
from twinspark.errors import ConfigError
from twinspark.model.linear import shard_slice
from twinspark.model.loading import load_model


class ThreadRank:
    """One rank of a group whose ranks are threads of this process."""

    def __init__(self, rank, size, board, barrier):
        self.rank, self.size = rank, size
        self._board, self._barrier = board, barrier

    def gather_shards(self, parts):
        self._board[self.rank] = list(parts)
        self._barrier.wait(30)
        found = [part for rank in range(self.size) for part in self._board[rank]]
        self._barrier.wait(30)
        return found


def run_ranks(path, size, work, virtual_shards=2):
    """Run `work(model)` on every rank; results in rank order."""
    board, barrier = {}, threading.Barrier(size)
    results, problems = [None] * size, []

    def main(rank):
        try:
            group = ThreadRank(rank, size, board, barrier)
            model = load_model(
                path, virtual_shards=virtual_shards, group=group, token_map=tiny_token_map()
            )
            results[rank] = work(model)
        except Exception as error:
            problems.append(error)
            barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results


def a_session(model):
    session = Session(model)
    logits = [session.prefill(prompt(40), chunk=23, mode="cone"), session.feed(prompt(6))]
    return torch.cat(logits), session.draft(5), session.state(), model.weight_bytes


@pytest.mark.parametrize("kind", ["plain", "exl3"])
def test_two_ranks_equal_one(kind, tiny_model, tiny_exl3_model):
    path = tiny.plain_path() if kind == "plain" else tiny.exl3_path()
    logits, draft, state, size = a_session(tiny_model if kind == "plain" else tiny_exl3_model)
    for found in run_ranks(path, 2, a_session):
        assert torch.equal(found[0], logits)
        assert found[1] == draft
        assert_same(found[2], state)
        assert found[3] < 0.7 * size


def test_another_v_is_another_build(tiny_model):
    single = load_model(tiny.plain_path(), virtual_shards=1, token_map=tiny_token_map())
    assert not torch.equal(a_session(single)[0], a_session(tiny_model)[0])


def test_shards_must_fit(tiny_model):
    with pytest.raises(ConfigError, match="o_groups 2 cannot be cut into 4 virtual shards"):
        load_model(tiny.plain_path(), virtual_shards=4, token_map=tiny_token_map())
    with pytest.raises(ConfigError, match="2 virtual shards cannot be spread over 3 ranks"):
        own_shards(ThreadRank(0, 3, {}, None), 2)


def test_shard_slices_fall_on_blocks():
    assert [shard_slice(2304, 4, s) for s in range(4)] == [
        slice(0, 640), slice(640, 1280), slice(1280, 1792), slice(1792, 2304)
    ]  # fmt: skip
    assert [shard_slice(512, 2, s) for s in range(2)] == [slice(0, 256), slice(256, 512)]
    assert shard_slice(64, 2, 1) == slice(32, 64)
    with pytest.raises(ConfigError, match="65 channels"):
        shard_slice(65, 2, 0)


def test_partials_are_rounded_then_added_ascending():
    parts = [torch.tensor([1 + 2**-9]), torch.tensor([2**-8 + 2**-20])]
    assert sum_shards(parts, SingleRank(), torch.bfloat16).item() == 1.0
    exact = [part.double() for part in parts]
    assert sum_shards(exact, SingleRank(), torch.float64).item() == sum(p.item() for p in exact)
