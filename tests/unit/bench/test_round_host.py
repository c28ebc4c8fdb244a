"""What the host does between recorded rounds stays little: counts that do not depend on speed."""

import pytest

from twinspark.bench.round_host import measure_round_host


@pytest.mark.parametrize("slots", [1, 4])
def test_a_round_with_drafts_is_two_replays_and_no_copy(slots):
    got = measure_round_host(slots=slots, rounds=10)
    assert (got.slots, got.rows, got.rounds) == (slots, 6, 10)
    assert got.copies == 0 and got.waits == 2
    assert got.torch_calls <= 1  # each costs microseconds that a device waits
    assert 0 < got.idle_us <= got.idle_p99_us and got.idle_us < got.step_us


@pytest.mark.parametrize("slots", [1, 4])
def test_a_round_with_copies_needs_no_pass(slots):
    got = measure_round_host(slots=slots, lookup=True, rounds=10)
    assert (got.slots, got.rows, got.rounds) == (slots, 16, 10)
    assert got.copies == 0 and got.waits == 1 and got.torch_calls <= 1
    assert 0 < got.idle_us <= got.idle_p99_us and got.idle_us < got.step_us
