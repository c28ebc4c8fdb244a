"""Rounds that are recorded before they come: which ones, and that nothing else comes of it."""

import pytest
from tests.fake_model import FakeModel, run_all
from tests.property.test_drafting import new_engine
from tests.unit.engine.test_rounds_ahead import alone, ask, recorded


def prepared(engine):
    """Prepare all there is; the keys of what is recorded then."""
    for count in range(100):
        if not engine.prepare():
            keys = engine._runner._rounds.recorded
            assert len(keys) >= count
            return keys
    raise AssertionError("preparing does not end")


def test_rounds_of_a_small_company_find_themselves_recorded():
    engine, recorder = recorded(slots=2)
    keys = prepared(engine)
    assert [size for kind, size, _ in keys if kind == "decode"] == [1, 2, 4, 6, 8, 12]
    for kind in ("draft by rules", "draft ahead"):
        assert [key for key in keys if key[0] == kind] == [(kind, 1, 0), (kind, 2, 0)]
    assert not any(recorder.replays.values())
    requests = [ask("a"), ask("b", first=60, temperature=0.8)]
    replies = run_all(engine, requests)
    assert all(replies.summary(request.request_id) == alone(request) for request in requests)
    assert sorted(engine._runner._rounds.recorded) == sorted(keys)
    assert recorder.replays["_draft_followers"] > 3


def test_copies_have_longer_windows():
    engine, _ = recorded(slots=2, lookup=True)
    assert [size for kind, size, _ in prepared(engine) if kind == "decode"] == [
        1, 2, 4, 6, 8, 12, 16, 24, 32,
    ]  # fmt: skip


def test_preparing_between_requests_changes_no_reply():
    """Also where a pass was run ahead for a reply that has ended."""
    engine, _ = recorded(slots=2)
    for name, first in (("a", 20), ("b", 60)):
        request = ask(name, first=first)
        assert run_all(engine, [request]).summary(name) == alone(request)
        assert engine.prepare()
    prepared(engine)
    assert run_all(engine, [ask("c", first=90)]).summary("c") == alone(ask("c", first=90))


def test_the_context_of_the_latest_round_is_prepared_for_too_and_the_next_one(monkeypatch):
    monkeypatch.setattr("twinspark.engine.rounds.FIRST_CONTEXT", 16)
    engine, _ = recorded(slots=1)
    assert {context for kind, _, context in prepared(engine) if kind == "decode"} == {16, 32}
    run_all(engine, [ask("a")])  # 9 tokens and 30 more
    found = [(size, context) for kind, size, context in prepared(engine) if kind == "decode"]
    for expected in (64, 128):
        assert {size for size, context in found if context == expected} == {1, 2, 4, 6}
    assert {context for _, context in found} == {16, 32, 64, 128}


def test_no_recording_goes_for_one_that_may_come(monkeypatch):
    for module in ("recording", "rounds"):
        monkeypatch.setattr(f"twinspark.engine.{module}.MOST_RECORDED", 5)
    engine, _ = recorded(slots=2)
    assert len(prepared(engine)) == 5


@pytest.mark.parametrize("settings", [{"draft": False}, {"lookup": False}])
def test_passes_are_prepared_where_there_are_some(settings):
    engine, _ = recorded(slots=1, **settings)
    kinds = {kind for kind, _, _ in prepared(engine)}
    assert kinds == ({"decode"} if settings == {"draft": False} else
                     {"decode", "draft by rules", "draft ahead"})  # fmt: skip


def test_where_nothing_is_recorded_ahead():
    assert not new_engine(FakeModel()).prepare()  # a CPU
    engine, recorder = recorded(slots=1)
    engine._runner._is_alone = False  # ranks record a round together
    assert not engine.prepare() and not recorder.replays


def test_a_fault_while_idle_ends_nothing(caplog, monkeypatch):
    engine, _ = recorded(slots=2)
    monkeypatch.setattr(engine._runner._rounds._recordings, "of", lambda *_: 1 / 0)
    assert not engine.prepare() and not engine.prepare()
    assert caplog.text.count("ZeroDivisionError") == 1
    monkeypatch.undo()
    assert not engine.prepare()
    request = ask("a")
    assert run_all(engine, [request]).summary("a") == alone(request)
