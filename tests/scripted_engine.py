"""A ServedEngine that plays a given list of rounds, each token ids or a piece of text.

It ends replies as the real engine does: by its own end, limits, stop strings, complete calls.
Log-probabilities are made up from the ids, so that tests can tell them.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from tests.fake_engine import FakeEngine, Round

from twinspark.engine.endings import Ending, Endings
from twinspark.messages import (
    Admitted,
    Failed,
    Finished,
    GenerateRequest,
    PromptScores,
    ReplyEvent,
    ReplyStats,
    TokenDelta,
    TokenScore,
    Waiting,
)
from twinspark.text.tokenizer import Tokenizer

Step = Round | str
PROMPT_PIECE = 3  # prompt scores an event


class ScriptedEngine(FakeEngine):
    """Plays the same rounds for every request, or what a function of the request says.

    Attributes:
        tops: likeliest ids that scores name, best first; as many as a request asks for.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_slots: int = 8, context: int = 4000) -> None:
        super().__init__(tokenizer, num_slots=num_slots, context=context)
        self.tops = tuple(range(256, 256 + 20))
        self._byte_ids = {
            data[0]: n for n in range(tokenizer.vocab_size)
            if len(data := tokenizer.token_bytes(n)) == 1
        }  # fmt: skip

    def play(self, rounds: Iterable[Step], *, then_eos: bool = True) -> None:
        """What every request gets from now on. Texts may hold special tokens."""
        steps = list(self._steps(rounds, then_eos))
        self.script = lambda request: iter(steps)

    def answer(self, rounds_of: Callable[[GenerateRequest], Iterable[Step]]) -> None:
        """What requests get from now on, each its own rounds, texts among them."""
        self.script = lambda request: self._steps(rounds_of(request), True)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, special tokens recognised."""
        return self.tokenizer.encode_full(text)

    def byte_ids(self, text: str | bytes) -> list[int]:
        """One token a byte, special tokens typed out."""
        data = text.encode() if isinstance(text, str) else text
        return [self._byte_ids[byte] for byte in data]

    def _steps(self, rounds: Iterable[Step], then_eos: bool) -> Iterable[Round]:
        for step in rounds:
            yield self.ids(step) if isinstance(step, str) else step
        if then_eos:
            yield [self.tokenizer.eos_id]

    async def _run(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Play the script; the rules of the engine itself say where the reply ends."""
        for event in self._prompt_scores(request):
            yield event
        limit = request.sampling.max_tokens or 10**9
        endings = Endings(request, limit=limit, tokenizer=self.tokenizer)
        ids: list[int] = []
        num_rounds = 0
        ending = None
        cached_tokens = 0
        for step in self._forced(request):
            await asyncio.sleep(step if isinstance(step, float) else self.round_s)
            if isinstance(step, Failed):
                yield replace(step, request_id=request.request_id)
                return
            if isinstance(step, Waiting | Admitted):
                cached_tokens = step.cached_tokens if isinstance(step, Admitted) else 0
                yield replace(step, request_id=request.request_id)
            if not isinstance(step, list):
                continue
            num_rounds += 1
            taken = []
            for token in step:
                taken.append(token)
                ending = endings.feed(token)
                if ending is not None:
                    break
            ids += taken
            if taken:
                wanted = request.sampling.logprobs
                scores = () if wanted is None else self.scores(taken, wanted)
                yield TokenDelta(
                    request_id=request.request_id, token_ids=tuple(taken), scores=scores
                )
            if ending is not None:
                break
        ending = ending or Ending(reason="length", cause="max_tokens")
        yield Finished(
            request_id=request.request_id,
            reason=ending.reason,
            cause=ending.cause,
            stop_string=ending.stop_string,
            stats=replace(self._stats(request, ids, num_rounds), cached_tokens=cached_tokens),
        )

    def _stats(self, request: GenerateRequest, ids: list[int], num_rounds: int) -> ReplyStats:
        return ReplyStats(
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(ids),
            decode_tokens=max(len(ids) - 1, 0),
            rounds=num_rounds,
            drafted=5 * num_rounds,
            accepted=max(len(ids) - num_rounds, 0),
            seed=request.sampling.seed or 0,
            token_sha=hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest(),
            token_ids=tuple(ids) if request.return_token_ids else None,
        )

    def _forced(self, request: GenerateRequest) -> Iterator[Round]:
        """The script, with the forced ids after its thinking block or before everything."""
        forced = list(request.forced_ids)
        if forced and not request.in_reasoning:
            yield forced
            forced = []
        for step in self.script(request):
            if not forced or not isinstance(step, list) or self.tokenizer.end_think_id not in step:
                yield step
                continue
            at = step.index(self.tokenizer.end_think_id) + 1
            yield step[:at]
            yield forced
            forced = []
            if step[at:]:
                yield step[at:]

    def _prompt_scores(self, request: GenerateRequest) -> Iterator[PromptScores]:
        wanted = request.sampling.prompt_logprobs
        if wanted is None:
            return
        scores = self.scores(request.prompt_ids[1:], wanted)
        for at in range(0, len(scores), PROMPT_PIECE):
            piece = scores[at : at + PROMPT_PIECE]
            yield PromptScores(request_id=request.request_id, first=at + 1, scores=piece)

    def scores(self, ids: Sequence[int], num_top: int) -> tuple[TokenScore, ...]:
        return tuple(self.score(token, num_top) for token in ids)

    def score(self, token: int, num_top: int) -> TokenScore:
        """A token's made-up score."""
        top = tuple((n, -(rank + 1) / 8) for rank, n in enumerate(self.tops[:num_top]))
        return TokenScore(token_id=token, logprob=-(token + 1) / 64, top=top)
