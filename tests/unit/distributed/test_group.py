"""Collectives over gloo, and what NCCL adds to them through a group that stands for it."""

import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from tests.gloo_ranks import on_two_ranks, raised
from tests.live_server import wait_until

from twinspark.distributed import nccl
from twinspark.distributed.group import ProcessRank
from twinspark.errors import RankFailed

NAMES = list(nccl.ENVIRONMENT)


def part(rank, shard, *, width=3):
    return torch.arange(2 * width, dtype=torch.bfloat16).view(2, width) + 100 * rank + 10 * shard


def test_shards_come_in_order_and_stand_together():
    def work(group, _store):
        own = [part(group.rank, shard) for shard in range(2)]
        stack = torch.stack(own)
        apart = stack.transpose(1, 2)  # not contiguous
        return (
            group.gather_shards(own),
            group.gather_stack(stack),
            group.gather_stack(apart),
            group.gather_ranks(own[0]),
            group.gather_stack(torch.zeros(1, 0, 3)).shape,
        )

    wanted = [part(rank, shard) for rank in range(2) for shard in range(2)]
    for shards, stack, apart, ranks, empty in on_two_ranks(work):
        assert all(torch.equal(a, b) for a, b in zip(shards, wanted, strict=True))
        assert stack.is_contiguous() and torch.equal(stack, torch.stack(wanted))
        assert torch.equal(apart, torch.stack(wanted).transpose(1, 2))
        assert torch.equal(ranks[0], part(0, 0)) and torch.equal(ranks[1], part(1, 0))
        assert empty == (2, 0, 3)


def test_uneven_shards_travel_padded():
    widths = [4, 3, 3, 2]

    def work(group, _store):
        own = [part(group.rank, n, width=widths[2 * group.rank + n]) for n in range(2)]
        return group.gather_shards(own, widths=widths)

    for found in on_two_ranks(work):
        for number, shard in enumerate(found):
            assert torch.equal(shard, part(number // 2, number % 2, width=widths[number]))


def test_in_a_rehearsal_nobody_is_asked():
    """Rank 1 rehearses alone, which must neither wait nor take part in rank 0's exchange."""

    def work(group, _store):
        own = part(group.rank, 0)[None]
        rehearsed = None
        if group.rank == 1:
            with pytest.raises(ZeroDivisionError), group.rehearsal():
                rehearsed = group.gather_stack(own), group.gather_ranks(own)
                raise ZeroDivisionError
        return rehearsed, group.gather_stack(own)

    (_, zero), ((stack, ranks), one) = on_two_ranks(work)
    assert torch.equal(stack, torch.stack([part(1, 0)] * 2))
    assert all(torch.equal(found, part(1, 0)[None]) for found in ranks)
    assert torch.equal(zero, torch.stack([part(0, 0), part(1, 0)])) and torch.equal(zero, one)


def test_two_ranks_on_one_card_are_refused_on_both():
    def refused(group, store):
        with pytest.raises(RankFailed, match="ranks 0 and 1 are both on the GPU GPU-7"):
            nccl.check_apart(store, group.rank, 2, None, card=lambda _device: "GPU-7")
        return True

    def apart(group, store):
        nccl.check_apart(store, group.rank, 2, None, card=lambda _device: f"GPU-{group.rank}")
        return True

    assert on_two_ranks(apart) == on_two_ranks(refused) == [True, True]


def test_the_first_exchange_shows_ranks_that_do_not_reach_each_other():
    def work(group, _store):
        nccl.warm_up(group, torch.device("cpu"))
        with pytest.raises(RankFailed, match="first exchange .* NCCL_P2P_DISABLE=1"):
            with group.rehearsal():  # as if nothing had come from elsewhere
                nccl.warm_up(group, torch.device("cpu"))
        return True

    assert on_two_ranks(work) == [True, True]


class StuckGroup:
    """A group whose exchange waits until it is aborted, as NCCL's kernels do."""

    def __init__(self, store=None, rank=0, size=1, options=None):
        self.options = options
        self.aborted = threading.Event()

    def _allgather_base(self, into, flat, options):
        assert options.asyncOp is False
        self.aborted.wait(60)

    def abort(self):
        assert not self.aborted.is_set(), "aborted twice"
        self.aborted.set()


class Options:
    """Of the group above."""


def test_an_abort_frees_who_waits_and_does_not_wait_itself():
    stuck = StuckGroup()
    group = ProcessRank(0, 2, stuck, failed=raised, abort=lambda: nccl.abort_group(stuck))
    waiting = threading.Thread(target=group.gather_ranks, args=(torch.ones(3),))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert group.wait_aborted(0)  # nothing was begun
    for _ in range(3):  # by whoever finds the failure, and at the end
        group.abort()
    waiting.join(10)
    assert not waiting.is_alive()
    assert group.wait_aborted(10)


def test_an_abort_that_waits_for_recordings_is_not_waited_for_longer():
    """NCCL's does, while a graph holds one of its kernels."""
    held = threading.Event()
    lazy = SimpleNamespace(abort=lambda: held.wait(60))
    group = ProcessRank(0, 2, lazy, failed=raised, abort=lambda: nccl.abort_group(lazy))
    group.abort()
    assert not group.wait_aborted(0.05)
    held.set()
    assert group.wait_aborted(10)


def test_an_abort_that_fails_is_a_line_in_the_log(caplog):
    class Broken:
        def abort(self):
            raise RuntimeError("no such communicator")

    nccl.abort_group(Broken())
    wait_until(lambda: "no such communicator" in caplog.text)


@pytest.fixture
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "gone")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return monkeypatch


def test_the_users_environment_goes_before_ours(clean):
    StuckGroup.Options = Options
    clean.setattr(torch.distributed, "ProcessGroupNCCL", StuckGroup, raising=False)
    clean.setenv("NCCL_NVLS_ENABLE", "1")
    group = nccl.make_nccl(None, 0, 2, torch.device("cuda", 0), timeout=timedelta(hours=3))
    assert group.options._timeout == timedelta(hours=3)
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert {name: os.environ[name] for name in NAMES if name != "NCCL_NVLS_ENABLE"} == {
        name: value for name, value in nccl.ENVIRONMENT.items() if name != "NCCL_NVLS_ENABLE"
    }


def test_a_torch_without_nccl_says_so(clean):
    clean.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    with pytest.raises(RankFailed, match="built without NCCL"):
        nccl.make_nccl(None, 0, 2, torch.device("cuda", 0), timeout=timedelta(hours=3))
