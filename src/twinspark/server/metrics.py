"""What `/metrics` says: counts of the server, and the engine's newest snapshot, in Prometheus text.

vLLM's names where the meaning is the same, `twinspark_` for the rest. A family that cannot be
counted is left out, never a lasting zero. Read next: `watch.py` (who counts), `families.py`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinspark.messages import EngineStatus, Failed, Finished, GenerateRequest
from twinspark.server.families import Families, engine_families
from twinspark.server.streaming import RAW_SEND

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
IGNORED_HEADER = b"x-twinspark-ignored-fields"
SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
           10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
          120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
GAP_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
         10.0)  # fmt: skip
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5)) + (1e6,)


STATE_GAUGES = {
    "twinspark_ready": "1 when requests are taken.",
    "twinspark_engine_fatal": "1 when the engine is gone.",
    "twinspark_requests_open": "Replies under way, those that wait included.",
    "twinspark_requests_stalled": "Replies that stand still.",
    "twinspark_uptime_seconds": "Since the server began.",
}


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Take a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Counts up to each bound, cumulative, as the text format wants them."""
        found, so_far = [], 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound is None else repr(float(bound)), float(so_far)))
        return found


class Tally:
    """Counts of one server since its start.

    Attributes:
        prompt_tokens: of admitted requests; `cached_tokens` of them were not run again.
        generation_tokens: as they came, of replies that are open too.
        queried_tokens: of prompts that were looked up among saved prefixes.
        finished: requests by finish reason.
        failed: requests by kind of failure.
        clients_left: requests whose client left before the end.
        empty_replies: replies with neither text nor calls.
        ignored_fields: replies whose request had fields without effect.
        responses: HTTP responses by status.
        key_requests: requests by the label of their key; `key_prompt_tokens` and
            `key_reply_tokens` what they took.
        refused: requests that were turned away before any route, by the code of the refusal.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = self.queried_tokens = 0
        self.clients_left = self.ignored_fields = self.empty_replies = 0
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        self.key_requests: Counter[str] = Counter()
        self.key_prompt_tokens: Counter[str] = Counter()
        self.key_reply_tokens: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.first_token_s = Histogram(SHORT_S)
        self.round_gap_s = Histogram(GAP_S)
        self.token_s = Histogram(GAP_S)
        self.total_s = Histogram(LONG_S)
        self.queue_s = Histogram(LONG_S)
        self.prefill_s = Histogram(LONG_S)
        self.decode_s = Histogram(LONG_S)
        self.prompt_lengths = Histogram(TOKENS)
        self.reply_lengths = Histogram(TOKENS)

    def admit(self, request: GenerateRequest, cached_tokens: int) -> None:
        """A request has left the queue."""
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += cached_tokens
        if request.reuse and request.sampling.prompt_logprobs is None:
            self.queried_tokens += len(request.prompt_ids)

    def charge(self, label: str, prompt_tokens: int, reply_tokens: int) -> None:
        """A request of a key is over; tokens of its prompt that were saved do not count."""
        self.key_requests[label] += 1
        self.key_prompt_tokens[label] += prompt_tokens
        self.key_reply_tokens[label] += reply_tokens

    def end(self, last: Finished | Failed | None, *, total_s: float, prompt_tokens: int) -> None:
        """A request is over; None says that its client left."""
        if isinstance(last, Failed):
            self.failed[last.kind] += 1
            return
        if last is None:
            self.clients_left += 1
            self.finished["abort"] += 1
            return
        self.finished["abort" if last.reason == "cancelled" else last.reason] += 1
        stats = last.stats
        self.total_s.observe(total_s)
        self.queue_s.observe(stats.queue_ms / 1000)
        self.prefill_s.observe(stats.prefill_ms / 1000)
        self.decode_s.observe(stats.decode_ms / 1000)
        self.prompt_lengths.observe(prompt_tokens)
        self.reply_lengths.observe(stats.completion_tokens)
        if stats.decode_tokens:
            self.token_s.observe(stats.decode_ms / 1000 / stats.decode_tokens)


class Metrics:
    """The page of a server.

    Args:
        model_name: label of every family.
        tally: what the server counts.
        status: gives the engine's newest snapshot.
        gauges: gives the server's own state by name, see `STATE_GAUGES`.

    Attributes:
        tally: as given.
    """

    def __init__(
        self,
        model_name: str,
        tally: Tally,
        status: Callable[[], EngineStatus | None],
        gauges: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.tally = tally
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Page(model_name, tally, status, gauges))

    def text(self) -> bytes:
        """The page as it is now."""
        return generate_latest(self._registry)


class _Page(Collector):
    def __init__(
        self,
        model_name: str,
        tally: Tally,
        status: Callable[[], EngineStatus | None],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        self._model_name = model_name
        self._tally = tally
        self._status = status
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        families = Families(self._model_name)
        tally_families(families, self._tally)
        for name, value in self._gauges().items():
            families.gauge(name, STATE_GAUGES[name], value)
        status = self._status()
        if status is not None:
            engine_families(families, status)
        return families.found


def tally_families(families: Families, tally: Tally) -> None:
    """Add what the server counted."""
    count, histogram = families.count, families.histogram
    count("vllm:prompt_tokens", "Prompt tokens of admitted requests.", tally.prompt_tokens)
    count("vllm:generation_tokens", "Tokens of replies.", tally.generation_tokens)
    count("vllm:prefix_cache_queries", "Prompt tokens looked up.", tally.queried_tokens)
    count("vllm:prefix_cache_hits", "Prompt tokens found saved.", tally.cached_tokens)
    by_reason: dict[Any, float] = {r: tally.finished[r] for r in ("stop", "length", "abort")}
    families.counts("vllm:request_success", "Requests that ended.", "finished_reason", by_reason)
    by_kind: dict[Any, float] = {
        kind: tally.failed[kind] for kind in ("request", "busy", "capacity", "engine")
    }
    families.counts("twinspark_requests_failed", "Requests that failed.", "kind", by_kind)
    families.counts("twinspark_http_responses", "By status.", "code", tally.responses)
    count("twinspark_clients_left", "Clients that left early.", tally.clients_left)
    count("twinspark_ignored_fields", "Requests with such fields.", tally.ignored_fields)
    _key_families(families, tally)
    count("twinspark_empty_replies", "With neither text nor calls.", tally.empty_replies)
    for name, text, values in (
        ("vllm:time_to_first_token_seconds", "To the first token.", tally.first_token_s),
        ("vllm:request_time_per_output_token_seconds", "Decode time a token.", tally.token_s),
        ("twinspark_round_gap_seconds", "Between rounds of a reply.", tally.round_gap_s),
        ("vllm:e2e_request_latency_seconds", "Of the whole request.", tally.total_s),
        ("vllm:request_queue_time_seconds", "In the queue.", tally.queue_s),
        ("vllm:request_prefill_time_seconds", "For the prompt.", tally.prefill_s),
        ("vllm:request_decode_time_seconds", "For the reply.", tally.decode_s),
        ("vllm:request_prompt_tokens", "Length of the prompt.", tally.prompt_lengths),
        ("vllm:request_generation_tokens", "Length of the reply.", tally.reply_lengths),
    ):
        histogram(name, text, values.buckets(), values.total)


def _key_families(families: Families, tally: Tally) -> None:
    counts = families.counts
    text = "Requests turned away before any route."
    counts("twinspark_requests_refused", text, "reason", dict(tally.refused))
    counts("twinspark_key_requests", "Requests that ended.", "key", dict(tally.key_requests))
    for name, values in (
        ("twinspark_key_prompt_tokens", tally.key_prompt_tokens),
        ("twinspark_key_reply_tokens", tally.key_reply_tokens),
    ):
        counts(name, "Tokens run for a key.", "key", dict(values))


class CountResponses:
    """Counts HTTP responses by status, and those that say that fields were ignored."""

    def __init__(self, app: ASGIApp, tally: Tally) -> None:
        self._app = app
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._tally.responses[message["status"]] += 1
                if any(name == IGNORED_HEADER for name, _ in message["headers"]):
                    self._tally.ignored_fields += 1
            await send(message)

        scope[RAW_SEND] = send
        await self._app(scope, receive, counted)
