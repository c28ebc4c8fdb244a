"""Builds families of the metrics page, and those that come from the engine's snapshot.

Read next: `metrics.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from twinspark.messages import EngineStatus

MODEL_LABEL = "model_name"


class Families:
    """Families as they are found, each sample with the model's name.

    Attributes:
        found: in the order of the calls.
    """

    def __init__(self, model_name: str) -> None:
        self.found: list[Metric] = []
        self._model_name = model_name

    def gauge(self, name: str, text: str, value: float) -> None:
        """A figure that goes up and down."""
        self.gauges(name, text, None, {"": value})

    def gauges(self, name: str, text: str, label: str | None, values: Mapping[Any, float]) -> None:
        """One gauge by a label."""
        family = GaugeMetricFamily(name, text, labels=self._labels(label))
        self._fill(family, label, values)

    def count(self, name: str, text: str, value: float) -> None:
        """A figure that only grows; the text format adds `_total` to its name."""
        self.counts(name, text, None, {"": value})

    def counts(self, name: str, text: str, label: str | None, values: Mapping[Any, float]) -> None:
        """One counter by a label."""
        family = CounterMetricFamily(name, text, labels=self._labels(label))
        self._fill(family, label, values)

    def histogram(
        self, name: str, text: str, buckets: Sequence[tuple[str, float]], total: float
    ) -> None:
        """Cumulative buckets, the last for infinity, and the sum of the values."""
        family = HistogramMetricFamily(name, text, labels=self._labels(None))
        family.add_metric([self._model_name], buckets=list(buckets), sum_value=total)
        self.found.append(family)

    def _labels(self, label: str | None) -> list[str]:
        return [MODEL_LABEL] if label is None else [MODEL_LABEL, label]

    def _fill(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        label: str | None,
        values: Mapping[Any, float],
    ) -> None:
        for key, value in values.items():
            family.add_metric([self._model_name, *([] if label is None else [str(key)])], value)
        if family.samples:
            self.found.append(family)


def engine_families(families: Families, status: EngineStatus) -> None:
    """Add what the engine counted; a quarter of a second old at most while it works."""
    gauge, count = families.gauge, families.count
    gauge("vllm:num_requests_running", "Requests that hold a slot.", status.running)
    gauge("vllm:num_requests_waiting", "Requests in the queue.", status.waiting)
    gauge("twinspark_slots_free", "Slots nobody holds.", status.slots_free)
    count("twinspark_rounds", "Forward passes.", status.rounds)
    if status.pool_tokens:
        _pool(families, status)
    if status.prefix_hits or status.prefix_misses:
        text = "Requests that went on from a saved prefix, or found none."
        by_result = {"hit": status.prefix_hits, "miss": status.prefix_misses}
        families.counts("twinspark_prefix_lookups", text, "result", by_result)
    families.counts(
        "twinspark_admission_waits", "Requests that waited.", "cause", dict(status.waits)
    )
    if status.drafted_at:
        _drafting(families, status)
    text = "Memory that a rank can still take, in bytes."
    by_rank = dict(enumerate(status.usable_bytes))
    families.gauges("twinspark_usable_bytes", text, "rank", by_rank)


def _pool(families: Families, status: EngineStatus) -> None:
    gauge = families.gauge
    free, held = status.pool_free_tokens, status.cached_tokens_held
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the pool that running requests hold, 0 to 1.",
        max(0.0, 1.0 - (free + held) / status.pool_tokens),
    )
    gauge("twinspark_pool_tokens", "Positions of the pool.", status.pool_tokens)
    gauge("twinspark_pool_free_tokens", "Positions nobody holds.", free)
    gauge("twinspark_pool_prefix_tokens", "Positions only saved prefixes hold.", held)
    gauge("twinspark_checkpoints", "Saved resume points.", status.checkpoints)


def _drafting(families: Families, status: EngineStatus) -> None:
    count, counts = families.count, families.counts
    drafted, accepted = sum(status.drafted_at), sum(status.accepted_at)
    count("vllm:spec_decode_num_drafts", "Windows with drafts.", status.drafted_at[0])
    count("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", drafted)
    count("vllm:spec_decode_num_accepted_tokens", "Kept drafts.", accepted)
    counts(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Kept drafts by place in the window.",
        "position",
        dict(enumerate(status.accepted_at)),
    )
    counts(
        "twinspark_draft_tokens_per_pos",
        "Drafted tokens by place in the window.",
        "position",
        dict(enumerate(status.drafted_at)),
    )
    for name, text, total, lookup in (
        ("twinspark_draft_tokens", "Drafted tokens by source.", drafted, status.lookup_drafted),
        ("twinspark_accepted_tokens", "Kept drafts by source.", accepted, status.lookup_accepted),
    ):
        counts(name, text, "source", {"dspark": total - lookup, "lookup": lookup})
    count("twinspark_draft_passes", "Passes of the draft blocks.", status.draft_passes)
