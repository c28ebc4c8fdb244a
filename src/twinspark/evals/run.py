"""Asks a subject an evaluation's items, several at a time, and keeps the results in order.

Which thread asks what never shows: items are made in order, results are put back in it, and a
greedy reply does not depend on its company. Read next: `report.py`.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from twinspark.errors import CapacityError, RequestError
from twinspark.evals.case import NOT_MEASURABLE, Subject
from twinspark.evals.evaluation import Evaluation, Item, Result

REFUSALS_TO_STOP = 5
JOIN_S = 5.0

OnResult = Callable[[Result], None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run brought.

    Attributes:
        results: of the finished items, in the order of the items.
        wanted: items that were to be measured.
        seconds: from the first item to the last result.
        ended_by: what ended it early, such as a KeyboardInterrupt, a TwinSparkError, or a fault of
            our own; None if nothing did.
    """

    results: tuple[Result, ...]
    wanted: int
    seconds: float
    ended_by: BaseException | None = None


@dataclass
class _Shared:
    """What the threads share; `lock` guards `items` and `taken`."""

    items: Iterator[Item]
    lock: threading.Lock = field(default_factory=threading.Lock)
    taken: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)
    news: "queue.SimpleQueue[tuple[int, Result] | BaseException | None]" = field(
        default_factory=queue.SimpleQueue
    )

    def take(self) -> tuple[int, Item] | None:
        """The next item and its number; None when there is none."""
        with self.lock:
            item = None if self.is_over.is_set() else next(self.items, None)
            if item is None:
                return None
            self.taken += 1
            return self.taken - 1, item


def run(
    evaluation: Evaluation,
    subject: Subject,
    *,
    num: int,
    seed: int,
    concurrency: int,
    on_result: OnResult = lambda _result: None,
) -> Run:
    """Measure `num` items of a seed.

    An item that cannot be asked counts as wrong with its cause. The run ends early, with what is
    there, on Ctrl-C, when the subject has gone, when it cannot be measured so at all, and when it
    refuses everything from the start. After the last two the subject can be asked other things.

    Args:
        evaluation: what is measured.
        subject: what is asked.
        num: of items.
        seed: of the items.
        concurrency: items at a time.
        on_result: told of each result as it comes, in the calling thread.
    """
    begin = time.monotonic()
    results: dict[int, Result] = {}
    threads: list[threading.Thread] = []
    ended_by: BaseException | None = None
    shared = _Shared(items=evaluation.items(num, seed, subject.count_tokens))
    try:
        for number in range(min(concurrency, num)):
            name = f"eval-{number}"
            thread = threading.Thread(target=_work, args=(shared, subject), daemon=True, name=name)
            thread.start()
            threads.append(thread)
        ended_by = _collect(shared, len(threads), results, on_result)
    except KeyboardInterrupt as error:
        ended_by = error
    shared.is_over.set()
    will_end = ended_by is None or isinstance(ended_by, RequestError)
    if not will_end:
        subject.cancel()
    try:
        _join(threads, None if will_end else JOIN_S)
    except KeyboardInterrupt as error:  # the second one, or one that comes at the end
        subject.cancel()
        ended_by = ended_by or error
    return Run(
        results=tuple(results[n] for n in sorted(results)),
        wanted=num,
        seconds=time.monotonic() - begin,
        ended_by=ended_by,
    )


def _join(threads: Sequence[threading.Thread], seconds: float | None) -> None:
    """Wait for all threads, so many seconds in all; one that waits for a dead server is left."""
    deadline = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _collect(
    shared: _Shared, num_threads: int, results: dict[int, Result], on_result: OnResult
) -> BaseException | None:
    """Take results until all threads are done, or until something ends the run."""
    refusals: list[str] = []
    while num_threads:
        found = shared.news.get()
        if found is None:
            num_threads -= 1
            continue
        if isinstance(found, BaseException):
            return found
        number, result = found
        results[number] = result
        on_result(result)
        if result.cause:
            refusals.append(result.cause)
        if len(refusals) == len(results) >= REFUSALS_TO_STOP:
            return RequestError(
                f"none of the first {len(refusals)} cases could be asked; the last one said: "
                f"{refusals[-1]}"
            )
    return None


def _work(shared: _Shared, subject: Subject) -> None:
    """Measure items until there are no more."""
    try:
        while (taken := shared.take()) is not None:
            number, item = taken
            result = _measure(item, subject)
            if shared.is_over.is_set():  # it may have been cut short
                return
            shared.news.put((number, result))
    except BaseException as error:
        shared.news.put(error)
    else:
        shared.news.put(None)


def _measure(item: Item, subject: Subject) -> Result:
    try:
        return item.measure(subject)
    except RequestError as error:
        if error.code == NOT_MEASURABLE:
            raise
        return Result(label=item.label, score=0.0, cause=str(error))
    except CapacityError as error:
        return Result(label=item.label, score=0.0, cause=str(error))
