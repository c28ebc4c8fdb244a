"""Numbers of a request are checked once, with the field at fault; the queue is bounded."""

import math

import pytest
from tests.fake_model import run_all

from twinspark.engine.core import failure_of
from twinspark.errors import CapacityError, ConfigError, RequestError

BAD = [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", 10**400), ("temperature", 1e-101), ("temperature", True),
    ("temperature", "1"), ("temperature", None),
    ("top_p", -0.01), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -1), ("min_p", 1.5),
    ("top_k", -1), ("top_k", 2.0), ("top_k", True), ("seed", 1.5), ("seed", "7"), ("seed", False),
    ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", 2.5), ("max_tokens", True),
    ("ignore_eos", 1), ("draft", None), ("stop", ("",)), ("stop", ("a", 3)),
    ("stop", ("x",) * 65), ("stop", ("x" * 4097,)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda v: str(v)[:12])
def test_bad_numbers_are_refused_by_name(field, value, make_engine, make_request):
    engine = make_engine()
    with pytest.raises(RequestError) as caught:
        engine.submit(make_request(0, **{field: value}))
    assert caught.value.param == field and len(str(caught.value)) > 20
    assert not engine.has_work
    run_all(engine, [make_request(0)])


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1e-100}, {"temperature": 1e6}, {"top_p": 0.0}, {"top_p": 1}, {"min_p": 1.0},
     {"top_k": 10**9}, {"top_k": 1}, {"seed": 10**30}, {"seed": -(10**30)}],
    ids=str,
)  # fmt: skip
def test_extreme_numbers_are_served(sampling, make_engine, make_request):
    assert len(run_all(make_engine(), [make_request(2, **sampling)]).tokens["r2"]) == 24


def test_a_stop_that_is_one_string_is_refused(make_engine):
    from twinspark.messages import GenerateRequest, Sampling

    request = GenerateRequest(request_id="a", prompt_ids=(20,), sampling=Sampling(stop="abc"))
    with pytest.raises(RequestError) as caught:
        make_engine().submit(request)
    assert caught.value.param == "stop"


@pytest.mark.parametrize("prompt", [(), (364,), (-1,), (1.0,), ("a",), (True,)], ids=str)
def test_bad_prompts_are_refused(prompt, make_engine, make_request):
    with pytest.raises(RequestError) as caught:
        make_engine().submit(make_request(0, prompt=prompt))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("prompt_len", "limit"), [(30, 11), (40, None), (41, None), (39, 2)])
def test_a_request_over_the_context_names_both_numbers(
    prompt_len, limit, make_engine, make_request
):
    engine = make_engine(max_context_tokens=40)
    with pytest.raises(RequestError) as caught:
        engine.submit(make_request(0, prompt_len=prompt_len, max_tokens=limit))
    assert caught.value.code == "context_length_exceeded"
    assert str(prompt_len) in str(caught.value) and "40" in str(caught.value)
    if limit is not None:
        assert str(limit) in str(caught.value)


@pytest.mark.parametrize(("prompt_len", "limit"), [(30, 10), (39, None), (39, 1)])
def test_a_request_that_just_fits_is_served(prompt_len, limit, make_engine, make_request):
    engine = make_engine(max_context_tokens=40)
    request = make_request(0, prompt_len=prompt_len, max_tokens=limit)
    assert len(run_all(engine, [request]).tokens["r0"]) == 40 - prompt_len


def test_the_queue_is_bounded_and_first_come_first_served(make_engine, make_request):
    engine = make_engine(slots=1, queue_size=2)
    for number in range(3):
        engine.submit(make_request(number, max_tokens=3))
    with pytest.raises(CapacityError, match="try again"):
        engine.submit(make_request(3))
    order = []
    while engine.has_work:
        order += [e.request_id for e in engine.step() if hasattr(e, "reason")]
    assert order == ["r0", "r1", "r2"]
    engine.submit(make_request(3))


def test_without_a_queue_free_slots_are_still_given(make_engine, make_request):
    engine = make_engine(slots=2, queue_size=0)
    engine.submit(make_request(0))
    engine.submit(make_request(1))
    with pytest.raises(CapacityError):
        engine.submit(make_request(2))


def test_an_id_in_use_is_refused(make_engine, make_request):
    engine = make_engine()
    engine.submit(make_request(0))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(make_request(0))
    run_all(engine, [])
    engine.submit(make_request(0))


def test_more_context_than_the_model_has_is_refused(make_engine):
    with pytest.raises(ConfigError, match="4096"):
        make_engine(max_context_tokens=4097)


def test_refusals_become_events():
    event = failure_of("a", RequestError("no", param="seed", code="x"))
    assert (event.kind, event.param, event.code) == ("request", "seed", "x")
    assert failure_of("a", CapacityError("full")).kind == "busy"
    assert failure_of("a", CapacityError("no memory", code="memory")).kind == "capacity"


def test_times_are_counted(make_engine, make_request):
    stats = run_all(make_engine(slots=1), [make_request(0), make_request(1)]).last["r1"].stats
    assert stats.queue_ms > 0 and stats.prefill_ms >= 0 and stats.decode_ms > 0
    assert stats.prompt_tokens == 2 and stats.cached_tokens == 0
