"""Runs long pure work in threads that neither the event loop nor the process's end waits for.

Threads of `asyncio.to_thread` are joined when the loop closes and at exit, so one long prompt could
hold up a shutdown for its whole encoding. Read next: `chat.py` (encodes prompts here).
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TypeVar

_Result = TypeVar("_Result")

NUM_WORKERS = 2


class Workers:
    """A few daemon threads at a time, one for each piece of work; the rest waits its turn."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._free = asyncio.Semaphore(num_workers)

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Do the work in a thread and return its result.

        A cancelled caller leaves at once. Work that has begun then ends unseen, and keeps its
        thread's place until it does, so cancelling never makes more threads than there are places.
        """
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()

        def finish(take: Callable[[], None]) -> None:
            self._free.release()
            if not done.done():
                take()

        def body() -> None:
            try:
                result = work()
            except Exception as error:
                self._tell(loop, finish, partial(done.set_exception, error))
            else:
                self._tell(loop, finish, partial(done.set_result, result))

        try:
            Thread(target=body, name="twinspark-worker", daemon=True).start()
        except RuntimeError:
            self._free.release()
            raise
        return await done

    @staticmethod
    def _tell(
        loop: asyncio.AbstractEventLoop,
        finish: Callable[[Callable[[], None]], None],
        take: Callable[[], None],
    ) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, take)
