"""The body of a request while it comes: in time, or refused; complete, it takes a place of its key.

Nothing is read here. Read next: `body.py` (who reads), `limits.py`, `connections.py` (what comes of
a body whose request is answered).
"""

import asyncio
from dataclasses import dataclass

from starlette.types import Message, Receive

from twinspark.server.errors import ApiError
from twinspark.server.keys import Key
from twinspark.server.limits import Limits
from twinspark.server.metrics import Tally

LEAST_BYTES_PER_S = 1024


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a body is awaited; None is for ever.

    Attributes:
        unsent_s: so long must not go by without 1 KiB for each of its seconds, or the end.
        body_s: until its end.
    """

    unsent_s: float | None
    body_s: float | None

    @property
    def least_bytes(self) -> int:
        """What `unsent_s` must bring."""
        return max(1, int((self.unsent_s or 0.0) * LEAST_BYTES_PER_S))


class Upload:
    """Receives a request; only the time that it waits for the client counts."""

    def __init__(
        self, receive: Receive, limits: Limits, key: Key | None, tally: Tally, patience: Patience
    ) -> None:
        self._receive = receive
        self._limits = limits
        self._key = key
        self._tally = tally
        self._patience = patience
        self._waited_s = 0.0
        self._since_s = 0.0  # waited, from when on what came is counted in `_fresh_bytes`
        self._fresh_bytes = 0
        self._num_bytes = 0
        self._is_complete = False
        self._has_place = False

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ApiError: 408 when the body does not come, 429 when it is complete and its key has no
                place.
        """
        if self._is_complete:
            return await self._receive()
        message = await self._awaited()
        self._is_complete = message["type"] != "http.request" or not message.get("more_body")
        if self._is_complete and message["type"] == "http.request" and self._key is not None:
            try:
                self._limits.enter(self._key)
            except ApiError as error:
                raise self._refused(error) from None
            self._has_place = True
        return message

    def close(self) -> None:
        """The request is over."""
        if self._has_place and self._key is not None:
            self._has_place = False
            self._limits.leave(self._key)

    async def _awaited(self) -> Message:
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        try:
            async with asyncio.timeout(self._left_s()):
                message = await self._receive()
        except TimeoutError:
            raise self._refused(self._too_slow(self._waited_s + clock() - begin_s)) from None
        self._waited_s += clock() - begin_s
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._fresh_bytes += num_bytes
        if self._fresh_bytes >= self._patience.least_bytes:
            self._since_s, self._fresh_bytes = self._waited_s, 0
        return message

    def _left_s(self) -> float | None:
        """How long the next piece may take."""
        unsent_s, body_s = self._patience.unsent_s, self._patience.body_s
        ends_s = [] if unsent_s is None else [self._since_s + unsent_s]
        ends_s += [] if body_s is None else [body_s]
        return max(0.0, min(ends_s) - self._waited_s) if ends_s else None

    def _too_slow(self, waited_s: float) -> ApiError:
        unsent_s, body_s = self._patience.unsent_s, self._patience.body_s
        if body_s is not None and waited_s >= body_s:
            said = (
                f"the request body was not complete after {body_s:g} s, {self._num_bytes} bytes of "
                "it came; send it again, in less time or as smaller requests"
            )
        else:
            said = (
                f"{self._fresh_bytes} bytes of the request body came in {unsent_s:g} s, expected "
                f"its end or at least {self._patience.least_bytes}; send it again as a whole"
            )
        return ApiError(
            408, said, param="body", code="body_timeout", headers={"connection": "close"}
        )

    def _refused(self, error: ApiError) -> ApiError:
        self._tally.refused[error.code or ""] += 1
        return error
