"""The pair's bench on two small ranks over gloo: both do the same, and the figures are there.

On a CPU nothing is recorded: the same calls are made again. Rows are placed through plain bodies.
"""

import json

import pytest
import torch
from tests.gloo_ranks import on_two_ranks
from tests.tiny import config as tiny_config
from typer.testing import CliRunner

from twinspark.bench.exchange import connect_one_shot, measure_exchanges, ordered_sum
from twinspark.bench.pair import PairPlan, measure_pair, same_bits
from twinspark.bench.rank import build_rank
from twinspark.cache.view import Caches
from twinspark.cli.main import app
from twinspark.errors import ConfigError

CPU = torch.device("cpu")
TINY = tiny_config()
PLAN = PairPlan(rows=(1, 6), context=256, chunk=40, chunk_context=256, slots=(1,))


def small(group):
    made = build_rank(CPU, ranks=2, rank=group.rank, group=group, config=TINY)
    made.model._is_placed = made.model._draft._is_placed = True
    return made, Caches(TINY, 4, PLAN.most_tokens)


@pytest.fixture(scope="module")
def measured():
    """Of each rank: the check, and every cell with the exchanges it made, real and rehearsed."""

    def work(group, _store):
        counted = []
        with torch.inference_mode():
            made, caches = small(group)
            checks = same_bits(made, caches, group, PLAN)
            gather = group._gather

            def counting(tensor):
                counted.append(group._rehearses)
                return gather(tensor)

            group._gather = counting
            found = []
            for cell in measure_pair(made, caches, group, PLAN):
                found.append((cell, counted.count(False), counted.count(True)))
                counted.clear()
        return checks, found

    return on_two_ranks(work)


def test_both_ranks_measure_all_cells_and_agree(measured):
    (checks, found), (others, theirs) = measured
    assert checks == others == {
        "rows": 6, "ranks_agree": True, "equal_to_rehearsal": True, "finite": True,
    }  # fmt: skip
    cells = [cell.as_dict() for cell, _, _ in found]
    assert [cell["name"] for cell in cells] == [cell.as_dict()["name"] for cell, _, _ in theirs]
    assert [cell["rows"] for cell in cells] == [1, 6, TINY.dspark_block_size, 40, 40]
    for cell in cells:
        assert cell["us"] > 0 and cell["alone_us"] > 0 and json.dumps(cell)
    layers, blocks = TINY.num_hidden_layers, TINY.num_nextn_predict_layers
    assert [cell["exchanges"] for cell in cells] == [
        2 * layers + 1, 2 * layers + 1, 2 * blocks + 1, 2 * TINY.first_decoder_layer, 2 * layers,
    ]  # fmt: skip


def test_the_exchanges_are_as_many_as_the_cells_say(measured):
    """Counted at the group, in the calls of each kind."""
    repeats = (10, 10, 10, 4, 4)  # calls of a cell with the other rank
    for _, found in measured:
        for (cell, real, rehearsed), calls in zip(found, repeats, strict=True):
            assert real == rehearsed == calls * cell.exchanges, cell


def test_a_rank_that_differs_is_found_before_anything_is_timed():
    def work(group, _store):
        with torch.inference_mode():
            made, caches = small(group)
            if group.rank == 1:
                made.model._norm_D.mul_(1.5)
            with pytest.raises(AssertionError, match="exchanges changed bits"):
                same_bits(made, caches, group, PLAN)
        return True

    assert on_two_ranks(work) == [True, True]


def test_every_way_of_an_exchange():
    def work(group, _store):
        reason = connect_one_shot(group, CPU)
        return reason, list(measure_exchanges(group, CPU, None, rows=(1, 6)))

    for reason, cells in on_two_ranks(work):
        assert "two ranks on GPUs" in reason
        assert [(cell.name, cell.rows) for cell in cells] == [
            (name, rows)
            for rows in (1, 6)
            for name in ("all-gather", "all-gather, ordered sum in torch", "all-reduce in place")
        ]
        assert all(cell.same_bits for cell in cells if cell.in_order)
        assert all(cell.us > 0 and cell.bytes_sent == cell.rows * 10240 for cell in cells)


def test_the_sum_is_rounded_once():
    parts = torch.tensor([[1.0], [2**-9 + 2**-16]]).bfloat16()
    assert ordered_sum(parts[:, None]).item() == (parts[0].float() + parts[1].float()).bfloat16()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "model,weather"], "expected some of exchange, model"),
        (["--rows", "0"], "numbers from 1 to 24"),
        (["--rank", "1"], "--rank needs --rendezvous"),
        (["--device", "cpu"], "two GPUs are timed"),
    ],
)
def test_flags_that_do_not_fit(flags, said):
    done = CliRunner().invoke(app, ["bench", "pair", *flags])
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs here")
def test_a_machine_without_two_gpus_says_so():
    done = CliRunner().invoke(app, ["bench", "pair"])
    assert isinstance(done.exception, ConfigError)
    assert "device" in str(done.exception)
