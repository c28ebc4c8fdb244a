"""The plain completions route: prompts run as they are given, several of them as several choices.

Read next: `completion_fields.py`, `completion_replies.py`, `generation.py` (what runs).
"""

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from twinspark.messages import GenerateRequest, Ready
from twinspark.server.body import read_json_object
from twinspark.server.chat_replies import ReplyHead, stats_of, usage_of
from twinspark.server.choices import Choice, collected
from twinspark.server.completion_fields import (
    MAX_REPLIES,
    CompletionFields,
    Prompt,
    ignored_fields,
    parse_completion_fields,
    read_prompts,
)
from twinspark.server.completion_replies import (
    Scores,
    choice,
    completion,
    prompt_logprobs,
)
from twinspark.server.errors import bad_request
from twinspark.server.generation import (
    Ended,
    Generation,
    Prepared,
    PromptScored,
    Started,
    TextDelta,
    several,
    usage_of_all,
)
from twinspark.server.prompting import (
    THREAD_CHARS,
    THREAD_IDS,
    encode_prompt,
    in_thread_if,
    is_heavy,
    reply_limit,
)
from twinspark.server.request_fields import ignored_header
from twinspark.server.request_log import About
from twinspark.server.state import ServerState
from twinspark.server.streaming import event, shaped
from twinspark.text.completion import encode_completion, render_gap
from twinspark.text.grammar import text_form


@dataclass(frozen=True, kw_only=True)
class PreparedCompletion:
    """A body, checked.

    Attributes:
        fields: its fields besides the prompts.
        prepared: what to run.
        num_added: tokens in front of each prompt that the client did not write.
    """

    fields: CompletionFields
    prepared: Prepared
    num_added: tuple[int, ...]


async def completions(request: Request) -> ASGIApp:
    """Answer `POST .../completions`.

    Raises:
        ApiError: the request is refused before any work.
        RequestError: the same.
    """
    arrived = time.monotonic()
    state: ServerState = request.app.state.server
    config = state.config
    body = await read_json_object(
        request, max_body_bytes=config.max_body_bytes, max_nesting=config.max_nesting
    )
    reply_id = f"cmpl-{secrets.token_hex(12)}"
    about = About.of(request, route="completions")
    asked = await prepare_completion(state, body, reply_id=reply_id, about=about)
    reply = CompletionReply(state, asked, Generation(state, asked.prepared, arrived=arrived))
    ignored = await in_thread_if(is_heavy(body), state, partial(ignored_fields, body))
    return shaped(
        reply,
        is_streamed=bool(asked.fields.stream),
        keepalive_s=config.keepalive_s,
        headers=ignored_header(ignored),
    )


async def prepare_completion(
    state: ServerState, body: Mapping[str, Any], *, reply_id: str, about: About
) -> PreparedCompletion:
    """Everything that is decided before the engine: checks, prompts, limits.

    Raises:
        ApiError: 400 for a field or a length at fault, 503 while no work is taken.
        RequestError: a 400 as well.
    """
    fields = parse_completion_fields(body)
    ready = state.require_ready()
    fields.check_ids(ready.vocab_size)
    prompts = read_prompts(body, ready.vocab_size)
    num_choices = fields.num_choices
    if len(prompts) * num_choices > MAX_REPLIES:
        raise bad_request(
            f"{len(prompts)} prompts with n {num_choices} ask for {len(prompts) * num_choices} "
            f"replies, expected at most {MAX_REPLIES}",
            param="n",
        )
    form = await state.grammars(ready).settle(text_form(body))
    about = replace(about, choices=num_choices, is_streamed=bool(fields.stream))
    requests: list[GenerateRequest] = []
    num_added = []
    for n, prompt in enumerate(prompts):
        prompt_ids = await _encode(state, prompt, fields, ready)
        num_added.append(int(isinstance(prompt, str) and _is_added(state, prompt_ids, prompt)))
        limit = reply_limit(
            fields.reply_limit, len(prompt_ids), ready, state.config.default_max_tokens
        )
        generate = GenerateRequest(
            request_id=reply_id if n == 0 else f"{reply_id}-p{n}",
            prompt_ids=tuple(prompt_ids),
            sampling=fields.sampling(state.defaults, limit),
            continues=True,
            form=form,
        )
        requests += several(
            fields.served(generate),
            num_choices,
            is_reproducible=state.config.reproducible_seeds,
        )
    prepared = Prepared(
        requests=tuple(requests),
        num_per_prompt=num_choices,
        includes_stop=bool(fields.include_stop_str_in_output),
        about=about,
    )
    return PreparedCompletion(fields=fields, prepared=prepared, num_added=tuple(num_added))


async def _encode(
    state: ServerState, prompt: Prompt, fields: CompletionFields, ready: Ready
) -> Sequence[int]:
    """A prompt's ids. Token ids are run exactly as given; a text gets the begin token in front."""
    tokenizer = state.tokenizer
    if not isinstance(prompt, str):
        if fields.suffix:
            raise bad_request("suffix needs a prompt that is a text", param="suffix")
        return prompt
    num_bytes = len(prompt.encode("utf-8", "replace")) + len((fields.suffix or "").encode())
    least = -(-num_bytes // tokenizer.max_token_bytes)
    reply_limit(fields.reply_limit, least, ready, None, is_least=True)
    if fields.suffix:
        return await encode_prompt(state, render_gap(prompt, fields.suffix))
    return await in_thread_if(
        len(prompt) > THREAD_CHARS, state, lambda: encode_completion(tokenizer, prompt)
    )


def _is_added(state: ServerState, prompt_ids: Sequence[int], prompt: str) -> bool:
    """Whether the begin token in front is ours."""
    begin = state.tokenizer.bos_id
    return prompt_ids[0] == begin and not prompt.startswith(state.tokenizer.token_text(begin))


class CompletionReply:
    """Shapes what a generation gives.

    Attributes:
        news: where the request stands before its first token.
    """

    def __init__(
        self, state: ServerState, asked: PreparedCompletion, generation: Generation
    ) -> None:
        self._asked = asked
        self._fields = asked.fields
        self._generation = generation
        self._state = state
        self._tokenizer = state.tokenizer
        self._is_long = any(len(r.prompt_ids) > THREAD_IDS for r in asked.prepared.requests)
        self._head = ReplyHead(
            reply_id=asked.prepared.requests[0].request_id,
            created=int(time.time()),
            model=state.name_for(asked.fields.model),
        )
        self.news = generation.news

    async def collect(self) -> dict[str, Any]:
        """The whole reply as one object.

        Raises:
            ApiError: the engine failed a request.
        """
        choices = await collected(self._generation)
        ended = [each.ended for each in choices]
        found = await in_thread_if(
            self._is_long, self._state, lambda: [self._whole(each) for each in choices]
        )
        reply = completion(self._head, found, self._usage(ended))
        return reply | {"stats": stats_of(ended)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply as framed events: text as it comes, finish and, when asked for, usage.

        Raises:
            ApiError: the engine failed a request.
        """
        has_usage = self._fields.include_usage
        nothing_yet = {"usage": None} if has_usage else {}
        num_choices = len(self._asked.prepared.requests)
        streams = [_Stream(self, index) for index in range(num_choices)]
        ended: list[Ended] = []
        async with aclosing(self._generation.run()) as parts:
            async for part in parts:
                if isinstance(part, Started | PromptScored):
                    streams[part.choice].note(part)
                    continue
                stats: dict[str, Any] = {}
                if isinstance(part, Ended):
                    ended.append(part)
                    is_last = len(ended) == num_choices and not has_usage
                    stats = {"stats": stats_of(ended)} if is_last else {}
                stream = streams[part.choice]
                pieces = partial(stream.pieces, part)
                for piece in await in_thread_if(
                    self._is_long and not stream.has_begun, self._state, pieces
                ):
                    yield event(completion(self._head, [piece]) | nothing_yet | stats)
        if has_usage:
            chunk = completion(self._head, [], self._usage(ended))
            yield event(chunk | {"stats": stats_of(ended)})

    def echoed_ids(self, index: int) -> tuple[int, ...]:
        """The prompt of a choice as the client wrote it."""
        added = self._asked.num_added[index // self._asked.prepared.num_per_prompt]
        return self._asked.prepared.requests[index].prompt_ids[added:]

    def echo(self, index: int, scores: Sequence[Any], block: Scores) -> tuple[str, Any]:
        """Text and log-probabilities of a choice's prompt, as far as they were asked for."""
        if not self._fields.echo:
            return "", None
        ids = self.echoed_ids(index)
        text = self._tokenizer.decode(ids)
        if self._fields.logprobs is None:
            return text, None
        return text, block.prompt_block(ids, scores[-len(ids) :])

    def scores(self) -> Scores:
        """What writes the log-probabilities of one choice."""
        return Scores(self._tokenizer)

    @property
    def has_logprobs(self) -> bool:
        """Whether they were asked for."""
        return self._fields.logprobs is not None

    def _whole(self, each: Choice) -> dict[str, Any]:
        block = self.scores()
        text, logprobs = self.echo(each.index, each.prompt_scores, block)
        if self.has_logprobs:
            rest = block.block(each.scores)
            logprobs = {name: logprobs[name] + rest[name] for name in rest} if logprobs else rest
        found = choice(
            each.index, text + each.content, logprobs=logprobs, finish_reason=each.ended.finish
        )
        if self._fields.prompt_logprobs is None:
            return found
        num_tokens = len(self._asked.prepared.requests[each.index].prompt_ids)
        scores = prompt_logprobs(self._tokenizer, num_tokens, each.prompt_scores)
        return found | {"prompt_logprobs": scores}

    def _usage(self, ended: Sequence[Ended]) -> dict[str, Any]:
        return usage_of(usage_of_all(self._asked.prepared, ended))


class _Stream:
    """One choice of a stream.

    Attributes:
        has_begun: its first piece is out.
    """

    def __init__(self, reply: CompletionReply, index: int) -> None:
        self._reply = reply
        self._index = index
        self._block = reply.scores()
        self._prompt_scores: list[Any] = []
        self.has_begun = False

    def note(self, part: Started | PromptScored) -> None:
        """Keep the prompt's scores; they go with its text."""
        if isinstance(part, PromptScored):
            self._prompt_scores += part.scores

    def pieces(self, part: TextDelta | Ended) -> list[dict[str, Any]]:
        """The choices of the chunks that a part becomes; the first one begins with the prompt."""
        found = []
        if not self.has_begun:
            self.has_begun = True
            text, logprobs = self._reply.echo(self._index, self._prompt_scores, self._block)
            if text or logprobs:
                found.append(choice(self._index, text, logprobs=logprobs))
        if isinstance(part, Ended):
            found.append(choice(self._index, "", finish_reason=part.finish))
        elif part.content or part.scores:
            has_scores = self._reply.has_logprobs and part.scores
            logprobs = self._block.block(part.scores) if has_scores else None
            found.append(choice(self._index, part.content, logprobs=logprobs))
        return found
