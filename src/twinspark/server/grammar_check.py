"""Tries a request's grammar before the engine sees it: a bad one is a 400 with the reason.

Owns the child process that does it (`grammar_child.py`) and remembers verdicts. Read next:
`text/grammar.py`.
"""

import asyncio
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from contextlib import suppress

from twinspark.errors import CapacityError, RequestError
from twinspark.messages import Form
from twinspark.server.grammar_child import LENGTH, MAX_SECONDS
from twinspark.text.grammar import ReplyForm
from twinspark.text.tokenizer import Tokenizer

MAX_VERDICTS = 4096
MAX_WAITING = 64
_START_S = 60.0
_ANSWER_S = MAX_SECONDS + 5.0

logger = logging.getLogger(__name__)


class GrammarChecker:
    """Checks grammars one after the other. For one event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Start without a process; the first grammar, or `start`, brings it.

        Args:
            tokenizer: of the pack.
            vocab_size: ids that the model has.
        """
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._running: dict[bytes, asyncio.Task[str]] = {}
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    async def start(self) -> None:
        """Bring the process up, so that the first request need not wait for it."""
        async with self._lock:
            await self._bring_up()

    async def settle(self, wanted: ReplyForm) -> Form | None:
        """The form that the engine is given.

        Raises:
            RequestError: it cannot be compiled; says why, with the field as `param`.
            CapacityError: too many others wait for theirs.
        """
        if wanted.form is None:
            return None
        fault = await self.fault_of(wanted.form)
        if not fault:
            return wanted.form
        if wanted.fallback is not None and not await self.fault_of(wanted.fallback):
            return wanted.fallback
        raise RequestError(
            f"{wanted.param} cannot be followed: {fault}", param=wanted.param, code="grammar"
        )

    async def fault_of(self, form: Form) -> str:
        """What is wrong with a form; empty if nothing is.

        Raises:
            CapacityError: too many others wait for theirs.
        """
        key = hashlib.sha256(form.grammar.encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise CapacityError(
                    f"{len(self._running)} grammars wait to be compiled; try again later",
                    retry_after_s=MAX_SECONDS,
                )
            task = asyncio.create_task(self._settle(key, form.grammar))
            self._running[key] = task
        return await asyncio.shield(task)  # others may wait for it, and its process is in use

    async def _settle(self, key: bytes, grammar: str) -> str:
        try:
            async with self._lock:
                verdict = await self._ask(grammar)
        finally:
            del self._running[key]
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def close(self) -> None:
        """End the process, and what waits for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_child()

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _bring_up(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "twinspark.server.grammar_child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        closed = await asyncio.to_thread(self._tokenizer.closed_json)
        start = {
            "tokenizer": closed,
            "vocab_size": self._vocab_size,
            "eos_id": self._tokenizer.eos_id,
        }
        await self._send(self._child, start)
        return self._child

    async def _ask(self, grammar: str) -> str:
        """One question and its answer; a process that gave none is replaced once."""
        for _ in range(2):
            is_new = self._child is None
            try:
                child = await self._bring_up()
                async with asyncio.timeout(_ANSWER_S + (_START_S if is_new else 0.0)):
                    await self._send(child, {"grammar": grammar})
                    assert child.stdout is not None
                    (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
                    answer = json.loads(await child.stdout.readexactly(length))
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
                logger.warning("the grammar process gave no answer: %r", error)
                await self._end_child()
            else:
                return str(answer["error"])
        raise CapacityError("grammars cannot be compiled now; try again later", code="memory")

    async def _send(self, child: asyncio.subprocess.Process, fields: dict[str, object]) -> None:
        body = json.dumps(fields).encode()
        assert child.stdin is not None
        child.stdin.write(LENGTH.pack(len(body)) + body)
        await child.stdin.drain()
