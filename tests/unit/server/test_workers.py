import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest

from twinspark.server.workers import Workers


def test_results_and_errors_come_back() -> None:
    async def main() -> None:
        workers = Workers(1)
        assert await workers.run(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)
        assert await asyncio.gather(*(workers.run(partial(abs, n)) for n in range(9))) == [
            *range(9)
        ]

    asyncio.run(main())


def test_cancelled_work_keeps_its_place_until_it_ends() -> None:
    async def main() -> None:
        workers = Workers(1)
        goes_on = threading.Event()
        first = asyncio.create_task(workers.run(goes_on.wait))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(workers.run(lambda: "done"))
        assert not (await asyncio.wait({second}, timeout=0.05))[0]
        goes_on.set()
        assert await asyncio.wait_for(second, 5) == "done"

    asyncio.run(main())


def test_neither_loop_nor_process_waits_for_work() -> None:
    script = """
import asyncio, time
from twinspark.server.workers import Workers
async def main():
    task = asyncio.create_task(Workers().run(lambda: time.sleep(60)))
    await asyncio.sleep(0.05)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=20, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
