import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from tests.scripted_subject import Doubles, ScriptedSubject, number_of, right

import twinspark.evals.run as run_module
from twinspark.errors import CapacityError, EngineDied, RequestError
from twinspark.evals.case import NOT_MEASURABLE, Answer, Case, CountTokens, Message, Step
from twinspark.evals.evaluation import Result
from twinspark.evals.judged import Judged
from twinspark.evals.run import REFUSALS_TO_STOP, Run, run


def run_doubles(subject: ScriptedSubject, num: int = 12, *, concurrency: int = 4) -> Run:
    return run(Judged(Doubles()), subject, num=num, seed=0, concurrency=concurrency)


def test_results_stand_in_the_order_of_the_cases_whatever_the_concurrency() -> None:
    def slow_first(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        time.sleep(0.03 if number_of(messages) % 4 == 0 else 0.0)
        answer = right(messages, fields)
        return Answer(content=answer.content, completion_tokens=number_of(messages))

    runs = [
        run_doubles(ScriptedSubject(slow_first), concurrency=concurrency)
        for concurrency in (1, 3, 20)
    ]
    assert [result.tokens for result in runs[0].results] == list(range(12))
    assert runs[0].results == runs[1].results == runs[2].results
    assert all(done.ended_by is None and done.wanted == 12 for done in runs)


def test_so_many_are_asked_at_a_time() -> None:
    lock, open_now, most = threading.Lock(), 0, 0
    both = threading.Barrier(3)

    def wait(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        nonlocal open_now, most
        with lock:
            open_now += 1
            most = max(most, open_now)
        both.wait(5)
        with lock:
            open_now -= 1
        return right(messages, fields)

    done = run_doubles(ScriptedSubject(wait), 6, concurrency=3)
    assert len(done.results) == 6 and most == 3


@pytest.mark.parametrize("error", [RequestError("too long"), CapacityError("still busy")])
def test_a_case_that_cannot_be_asked_is_wrong_with_its_cause(error: Exception) -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        if number_of(messages) == 3:
            raise error
        return right(messages, fields)

    done = run_doubles(ScriptedSubject(reply))
    assert done.ended_by is None
    assert [r.cause for r in done.results] == ["", "", "", str(error)] + [""] * 8
    assert [r.score for r in done.results] == [1, 1, 1, 0] + [1] * 8
    assert done.results[3] == Result(label="odd", score=0.0, cause=str(error))


def test_when_the_subject_has_gone_what_was_finished_is_kept() -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        if number_of(messages) >= 5:
            raise EngineDied("gone")
        return right(messages, fields)

    subject = ScriptedSubject(reply)
    done = run_doubles(subject, concurrency=1)
    assert isinstance(done.ended_by, EngineDied)
    assert [result.label for result in done.results] == ["even", "odd", "even", "odd", "even"]
    assert subject.cancelled.is_set() and done.wanted == 12


def test_ctrl_c_cancels_the_subject_and_keeps_what_was_finished() -> None:
    """Ctrl-C comes while a case is being asked; that one is not counted."""
    subject: ScriptedSubject

    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        if number_of(messages) >= 2:
            assert subject.cancelled.wait(5)
        return right(messages, fields)

    subject = ScriptedSubject(reply)
    seen: list[Result] = []

    def press(result: Result) -> None:
        seen.append(result)
        if len(seen) == 2:
            raise KeyboardInterrupt

    done = run(Judged(Doubles()), subject, num=12, seed=0, concurrency=4, on_result=press)
    assert isinstance(done.ended_by, KeyboardInterrupt)
    assert [result.label for result in done.results] == ["even", "odd"]
    assert not [t for t in threading.enumerate() if t.name.startswith("eval-")]


def test_what_cannot_be_measured_at_all_ends_the_run() -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        raise RequestError("no rounds", code=NOT_MEASURABLE)

    subject = ScriptedSubject(reply)
    done = run_doubles(subject)
    assert isinstance(done.ended_by, RequestError) and str(done.ended_by) == "no rounds"
    assert done.results == ()
    assert not subject.cancelled.is_set()  # the next evaluation asks it


def test_a_subject_that_refuses_everything_is_not_asked_to_the_end() -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        time.sleep(0.01)
        raise RequestError("temperature is not served")

    subject = ScriptedSubject(reply)
    done = run_doubles(subject, 200, concurrency=1)
    assert len(done.results) == REFUSALS_TO_STOP
    assert len(subject.asked) < 200
    assert "temperature is not served" in str(done.ended_by)


def test_one_answer_among_refusals_goes_on() -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        if number_of(messages) != 1:
            raise RequestError("no")
        return right(messages, fields)

    done = run_doubles(ScriptedSubject(reply), 30, concurrency=1)
    assert done.ended_by is None and len(done.results) == 30


def test_an_answer_that_cannot_be_judged_is_wrong_with_its_cause() -> None:
    class Broken(Doubles):
        def cases(self, num: int, seed: int, count_tokens: CountTokens) -> Iterator[Case]:
            step = Step(
                add=({"role": "user", "content": "double 1"},),
                ideal={},
                judge=lambda answer: 1 // 0 == 1,
            )
            yield Case(label="x", steps=(step,))

    done = run(Judged(Broken()), ScriptedSubject(right), num=1, seed=0, concurrency=2)
    assert done.ended_by is None
    assert done.results[0].score == 0 and "could not be judged: ZeroDiv" in done.results[0].cause


def test_a_fault_of_our_own_ends_the_run_and_what_was_finished_is_kept() -> None:
    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        if number_of(messages) == 3:
            raise ZeroDivisionError("ours")
        return right(messages, fields)

    done = run_doubles(ScriptedSubject(reply), concurrency=1)
    assert isinstance(done.ended_by, ZeroDivisionError) and len(done.results) == 3


@pytest.mark.parametrize("is_pressed_again", [False, True])
def test_threads_that_hang_are_waited_for_together(
    is_pressed_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "JOIN_S", 30.0 if is_pressed_again else 0.3)
    hang = threading.Event()

    def reply(messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        if number_of(messages):
            hang.wait(60)
        return right(messages, fields)

    def press(result: Result) -> None:
        if is_pressed_again:
            main = threading.main_thread().ident
            assert main is not None
            threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
        raise KeyboardInterrupt

    begin = time.monotonic()
    subject = ScriptedSubject(reply)
    try:
        done = run(Judged(Doubles()), subject, num=12, seed=0, concurrency=8, on_result=press)
    finally:
        hang.set()
    assert time.monotonic() - begin < 2.0
    assert isinstance(done.ended_by, KeyboardInterrupt) and len(done.results) == 1
