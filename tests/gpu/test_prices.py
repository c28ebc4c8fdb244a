"""Rounds are priced by the device's time, and more rows of a round cost little more."""

from time import perf_counter, sleep

import pytest
import torch

from twinspark.engine.stopwatch import DeviceStopwatch
from twinspark.llm import LLM

pytestmark = pytest.mark.gpu


def test_a_round_is_timed_by_the_device_and_drafts_are_worth_their_price(monkeypatch, tmp_path):
    monkeypatch.setattr("twinspark.engine.core.measured_costs_path", lambda: tmp_path)
    with LLM.demo(device="cuda", slots=2, max_context_tokens=2048) as llm:
        costs = llm.engine._speculation.costs
        watch = llm.engine._runner.stopwatch()
    assert len(list(tmp_path.iterdir())) == 1
    assert costs.verify_us(4, 1) < 2 * costs.verify_us(1, 1)
    assert costs.verify_us(4, 2) < 2 * costs.verify_us(2, 2)
    assert isinstance(watch, DeviceStopwatch)


@pytest.mark.parametrize("tells", [True, False])
def test_what_the_host_does_behind_a_round_is_not_counted(tells):
    device = torch.device("cuda", 0)
    square = torch.ones(512, 512, device=device)
    _ = square @ square
    torch.cuda.synchronize()
    watch = DeviceStopwatch(device)
    began_s = perf_counter()
    watch.start()
    _ = square @ square
    if tells:
        watch.launched()
    sleep(0.2)
    found_s = watch.stop()
    assert 0.0 < found_s <= perf_counter() - began_s
    assert (found_s < 0.1) == tells
