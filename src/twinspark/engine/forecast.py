"""When a waiting request will be admitted, as far as speeds seen so far tell.

Predictions are only said, or refused by; no row and no token depends on them.
Read next: `pace.py` (the speeds), `scheduler.py` (who asks).
"""

import heapq
from collections.abc import Iterable, Sequence

from twinspark.engine.pace import Pace
from twinspark.engine.pages import PageStore
from twinspark.engine.pieces import RowCosts
from twinspark.engine.pool import SlotPool
from twinspark.engine.request import Session


class Forecast:
    """Predicts waits from slots, pages and speeds."""

    def __init__(self, pace: Pace, costs: RowCosts, store: PageStore, slots: SlotPool) -> None:
        """Look at these; nothing is changed."""
        self._pace = pace
        self._costs = costs
        self._store = store
        self._slots = slots

    def waits(
        self,
        running: Iterable[Session],
        queued: Iterable[Session],
        *,
        extra: tuple[int, int] | None = None,
    ) -> list[float] | None:
        """Seconds until each queued session is admitted.

        Args:
            running: sessions that hold a slot.
            queued: in the order of admission.
            extra: prompt tokens and reply limit of one more behind them.

        Returns:
            None while nothing has run that tells speeds.
        """
        live = list(running)
        num_windows = max(1, len(live))
        asked = [(s.prompt_tokens, s.limit) for s in queued]
        if extra is not None:
            asked.append(extra)
        ends: list[tuple[float, int]] = []
        for session in live:
            left_s = self._pace.left_s(
                units=self._units_left(session), tokens=session.tokens_left,
                num_windows=num_windows, done=session.num_reply_tokens,
            )  # fmt: skip
            if left_s is None:
                return None
            ends.append((left_s, len(session.pages)))
        runs: list[tuple[float, int]] = []
        for prompt_tokens, limit in asked:
            run_s = self._pace.left_s(
                units=float(prompt_tokens), tokens=limit, num_windows=num_windows
            )
            if run_s is None:
                return None
            runs.append((run_s, self._store.pages_needed(prompt_tokens, limit)))
        return predict_waits(
            ends, runs, slots_free=self._slots.num_free, pages_free=self._store.pages_to_have
        )

    def until_room(self, running: Iterable[Session], queued: Iterable[Session]) -> float | None:
        """Seconds until the next admission, which makes room in the queue."""
        waits = self.waits(running, queued, extra=(1, 1))
        return None if waits is None else waits[0]

    def _units_left(self, session: Session) -> float:
        if not session.marks:
            return 0.0
        return self._costs.units(session, session.computed, session.prompt_left)


def predict_waits(
    running: Iterable[tuple[float, int]],
    queued: Sequence[tuple[float, int]],
    *,
    slots_free: int,
    pages_free: int,
) -> list[float]:
    """When each queued request is admitted, if all goes as predicted.

    Args:
        running: seconds left and pages of each running request.
        queued: seconds to run and pages of each queued one, in their order.
        slots_free: slots nobody holds.
        pages_free: pages that are free or can be made free.

    Returns:
        Seconds from now, in the order of `queued`.
    """
    ends = list(running)
    heapq.heapify(ends)
    now_s, waits = 0.0, []
    for run_s, pages in queued:
        while ends and (slots_free == 0 or pages_free < pages):
            now_s, freed = heapq.heappop(ends)
            slots_free, pages_free = slots_free + 1, pages_free + freed
        waits.append(now_s)
        slots_free, pages_free = slots_free - 1, pages_free - pages
        heapq.heappush(ends, (now_s + run_s, pages))
    return waits
