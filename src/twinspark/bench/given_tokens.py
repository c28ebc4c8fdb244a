"""An engine that gives the same tokens to everybody, so that what is measured is the server.

Its own time is a pause before the first token and a turn of the event loop between rounds. Read
next: `server_load.py`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from twinspark.messages import (
    Admitted,
    EngineStatus,
    Finished,
    GenerateRequest,
    Loading,
    Ready,
    ReplyEvent,
    ReplyStats,
    TokenDelta,
)


class GivenTokens:
    """An EngineClient that is always ready.

    Args:
        token_ids: one reply has as many of them as it may have tokens, over and over.
        vocab_size: of the tokenizer.
        first_token_s: pause before the first token.
        context: longest prompt and reply.
    """

    loading: Loading | None = None
    failure: str | None = None
    status: EngineStatus | None = None

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        vocab_size: int,
        first_token_s: float = 0.0,
        context: int = 1 << 20,
    ) -> None:
        self.ready: Ready | None = Ready(
            model_name="given",
            vocab_size=vocab_size,
            max_context_tokens=context,
            num_slots=64,
            load_seconds=0.0,
        )
        self._token_ids = token_ids
        self._first_token_s = first_token_s

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        """One token a round, until the limit of the request."""
        request_id = request.request_id
        limit = request.sampling.max_tokens or 1
        began = time.perf_counter()
        cycle = [
            TokenDelta(request_id=request_id, token_ids=(token,))
            for token in self._token_ids[:limit]
        ]
        yield Admitted(request_id=request_id)
        if self._first_token_s:
            await asyncio.sleep(self._first_token_s)
        first_ms = 1000 * (time.perf_counter() - began)
        for n in range(limit):
            yield cycle[n % len(cycle)]
            await asyncio.sleep(0)
        yield Finished(
            request_id=request_id,
            reason="length",
            cause="max_tokens",
            stats=ReplyStats(
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=limit,
                decode_tokens=limit - 1,
                rounds=limit,
                prefill_ms=first_ms,  # what the engine itself took to its first token
                decode_ms=1000 * (time.perf_counter() - began) - first_ms,
            ),
        )
