"""A ServedEngine that plays scripts: each reply is a list of token ids of rounds, pauses, news."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import asdict

import numpy as np

from twinspark.messages import (
    Admitted,
    EngineStatus,
    Failed,
    Finished,
    GenerateRequest,
    Loading,
    Ready,
    ReplyEvent,
    ReplyStats,
    TokenDelta,
    Waiting,
)
from twinspark.text.reply import ReplyText
from twinspark.text.tokenizer import Tokenizer
from twinspark.text.tool_calls import CallRules

CAUSES = {"eos": "end_token", "stop": "stop_string", "calls": "calls", None: "max_tokens"}
Round = list[int] | float | Failed | Waiting | Admitted
Script = Callable[[GenerateRequest], Iterable[Round]]


class FakeEngine:
    """Runs scripts in a few slots, ends replies as the real engine does, and remembers.

    Attributes:
        script: what the next requests get; a float is a pause in seconds.
        round_s: time of a round.
        requests: every request that came.
        status: what the engine says of itself.
        live: ids of replies that hold a slot.
        cancelled: ids whose reader left before the end.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_slots: int = 4, context: int = 1000) -> None:
        self.tokenizer = tokenizer
        self.ready: Ready | None = Ready(
            model_name="fake",
            vocab_size=tokenizer.vocab_size,
            max_context_tokens=context,
            num_slots=num_slots,
            load_seconds=0.1,
        )
        self.loading: Loading | None = None
        self.failure: str | None = None
        self.status: EngineStatus | None = None
        self.script: Script = self.babble
        self.round_s = 0.0
        self.requests: list[GenerateRequest] = []
        self.live: set[str] = set()
        self.cancelled: list[str] = []
        self._slots = asyncio.Semaphore(num_slots)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        self.requests.append(request)
        is_over = False
        try:
            async with self._slots:
                self.live.add(request.request_id)
                async for event in self._run(request):
                    is_over = isinstance(event, Finished | Failed)
                    yield event
        finally:
            self.live.discard(request.request_id)
            if not is_over:
                self.cancelled.append(request.request_id)

    async def _run(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        sampling = request.sampling
        rules = None if request.calls is None else CallRules(**asdict(request.calls))
        text = ReplyText.of(request, self.tokenizer, calls=rules)
        ids: list[int] = []
        num_rounds = 0
        for step in self.script(request):
            await asyncio.sleep(step if isinstance(step, float) else self.round_s)
            if self.failure is not None:
                step = Failed(request_id=request.request_id, kind="engine", message=self.failure)
            if isinstance(step, Failed):
                yield step
                return
            if isinstance(step, Waiting | Admitted):
                yield step
            if not isinstance(step, list):
                continue
            num_rounds += 1
            step = step[: (sampling.max_tokens or 10**9) - len(ids)]
            step = step[: text.feed(step).num_used]
            ids += step
            if step:
                yield TokenDelta(request_id=request.request_id, token_ids=tuple(step))
            if text.end is not None or len(ids) == sampling.max_tokens:
                break
        yield Finished(
            request_id=request.request_id,
            reason="length" if text.end is None else "stop",
            stop_string=text.stop_string,
            cause=CAUSES[text.end],
            stats=ReplyStats(
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=len(ids),
                decode_tokens=max(len(ids) - 1, 0),
                rounds=num_rounds,
                drafted=5 * num_rounds,
                accepted=max(len(ids) - num_rounds, 0),
                seed=sampling.seed or 0,
                token_sha=hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest(),
                token_ids=tuple(ids) if request.return_token_ids else None,
            ),
        )

    def babble(self, request: GenerateRequest) -> Iterable[Round]:
        """Text that depends on the prompt and the seed, in rounds of one to four tokens."""
        key = f"{request.prompt_ids}{request.sampling.seed}".encode()
        noise = hashlib.sha256(key).digest()
        words = [f"w{byte:02x} caf\u00e9 \U0001f389" for byte in noise]
        ids = self.tokenizer.encode_plain(" ".join(words))
        if request.in_reasoning:
            thought = self.tokenizer.encode_plain(f"thinking about {noise[0]}")
            ids = [*thought, self.tokenizer.end_think_id, *ids]
        ids.append(self.tokenizer.eos_id)
        at = turn = 0
        while at < len(ids):
            size = 1 + noise[turn % len(noise)] % 4
            yield ids[at : at + size]
            at += size
            turn += 1

    def say(self, text: str, *, group: int = 1, then_eos: bool = True) -> Script:
        """A script that writes a text, `group` tokens a round."""
        ids = self.tokenizer.encode_full(text)
        ids += [self.tokenizer.eos_id] if then_eos else []
        return lambda request: (ids[at : at + group] for at in range(0, len(ids), group))
