"""The in-process driver: closing from elsewhere, Ctrl-C, and what both leave behind."""

import signal
import threading

import pytest
from tests.fake_model import FakeModel

from twinspark.engine.driver import Driver
from twinspark.messages import Finished, GenerateRequest, Sampling, TokenDelta

WAIT_S = 20


def ask(name, prompt_len=5, limit=6):
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(range(20, 20 + prompt_len)), reuse=False,
        sampling=Sampling(temperature=0.0, seed=1, max_tokens=limit, ignore_eos=True, draft=False),
    )  # fmt: skip


def rest(driver, name):
    tokens = []
    while (event := driver.next_event(name)) is not None:
        if isinstance(event, TokenDelta):
            tokens += event.token_ids
        if isinstance(event, Finished):
            return tokens, event.reason
    return tokens, None


@pytest.fixture
def make_driver(make_engine):
    def make(**settings):
        model = FakeModel()
        return model, Driver(make_engine(model=model, prefill_chunk=4, **settings))

    return make


@pytest.mark.parametrize("is_queued", [False, True])
def test_dropping_a_request_somebody_waits_for_ends_the_wait(is_queued, make_driver):
    """While its prompt runs, or while it waits for a slot: no event of its own will ever come."""
    model, driver = make_driver(slots=1, max_context_tokens=512)
    if is_queued:
        driver.submit(ask("first", limit=200))
    driver.submit(ask("a", prompt_len=200))
    model.on_forward = lambda: len(model.calls) == 3 and driver.drop("a")
    found = []
    reader = threading.Thread(target=lambda: found.append(rest(driver, "a")), daemon=True)
    reader.start()
    reader.join(WAIT_S)
    assert found == [([], None)]
    model.on_forward = None
    driver.submit(ask("b"))
    assert len(rest(driver, "b")[0]) == 6


def test_ctrl_c_inside_a_round_is_raised_after_it_and_costs_nothing(make_driver):
    model, driver = make_driver()
    driver.submit(ask("a", limit=12))
    wanted = rest(driver, "a")
    driver.submit(ask("b", limit=12))
    model.on_forward = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        rest(driver, "b")
    model.on_forward = None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    tokens, reason = rest(driver, "b")
    assert wanted[0][-len(tokens) :] == tokens and reason == wanted[1]
    driver.submit(ask("c", limit=12))
    assert rest(driver, "c") == wanted


def test_a_dropped_request_is_gone_from_the_status_at_once(make_driver):
    _, driver = make_driver()
    driver.submit(ask("a", limit=100))
    driver.next_event("a")
    assert driver.status.running == 1
    driver.drop("a")
    assert driver.status.running == 0
