"""Ranks: shards of several ranks in threads give the bits of one rank (design D17, I10)."""

import functools

import pytest
import torch
from tests import tiny
from tests.golden import tiny_weights
from tests.thread_ranks import ThreadRank, on_threads, thread_group
from tests.unit.model.harness import Session, assert_same, prompt, tiny_token_map

from twinspark.distributed.collectives import SingleRank, own_shards, sum_shards
from twinspark.errors import ConfigError
from twinspark.model.linear import shard_slice
from twinspark.model.loading import load_model


def run_ranks(path, size, work, virtual_shards=2):
    """Run `work(model)` on every rank; results in rank order."""
    settings = {"virtual_shards": virtual_shards, "token_map": tiny_token_map()}
    return on_threads(
        thread_group(size), lambda group: work(load_model(path, group=group, **settings))
    )


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


EVEN = {"o_groups": 4, "moe_intermediate_size": 512}
UNEVEN = {"o_groups": 4, "moe_intermediate_size": 640, "vocab_size": 896}


@functools.cache
def four_shards_pack(kind, uneven):
    """TINY with sizes that can be cut in four: into equal parts, or into 2, 1, 1, 1 blocks."""
    changes = UNEVEN if uneven else EVEN
    document = dict(tiny.CONFIG, text_config=dict(tiny.CONFIG["text_config"], **changes))
    folder = tiny.plain_path().parent / f"four-{kind}-{uneven}"
    if kind == "plain":
        tiny_weights.write_pack(folder, document)
    else:
        tiny.write_exl3(folder, document=document)
    return folder


@pytest.mark.parametrize(("kind", "uneven"), [("exl3", False), ("plain", True), ("exl3", True)])
def test_one_two_and_four_ranks_at_four_shards(kind, uneven):
    """With 7 vocabulary blocks in four shards a rank of two holds 2 + 2 or 2 + 1 of them."""
    path = four_shards_pack(kind, uneven)
    (logits, draft, state, size), *_ = run_ranks(path, 1, a_session, virtual_shards=4)
    assert logits.shape[1] == (896 if uneven else 512)
    for ranks in (2, 4):
        for found in run_ranks(path, ranks, a_session, virtual_shards=4):
            assert torch.equal(found[0], logits)
            assert found[1] == draft
            assert_same(found[2], state)
            assert found[3] < (0.7 if ranks == 2 else 0.5) * size


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
