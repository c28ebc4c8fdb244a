"""The metrics page: names, meaning, and that it says nothing it cannot know."""

import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, serve_in_thread, wait_until

from twinspark.messages import Admitted, EngineStatus, Failed, GenerateRequest, Sampling
from twinspark.server.metrics import Histogram, Metrics, Tally

STATUS = EngineStatus(
    running=3,
    waiting=2,
    rounds=70,
    slots_free=1,
    pool_tokens=1000,
    pool_free_tokens=500,
    cached_tokens_held=250,
    checkpoints=4,
    prefix_hits=5,
    prefix_misses=6,
    drafted_at=(10, 8, 4),
    accepted_at=(7, 3, 1),
    lookup_drafted=5,
    lookup_accepted=2,
    draft_passes=12,
    waits=(("slot", 4), ("pool", 1)),
    usable_bytes=(111, 222),
)


def parse(text: str) -> dict[str, float]:
    """Samples by name and labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels["model_name"] == "m" or sample.labels["model_name"] == "tiny"
            name = sample.name + "".join(f"{{{v}}}" for v in labels.values())
            assert name not in found
            found[name] = sample.value
    return found


def page(status: EngineStatus | None, tally: Tally | None = None) -> dict[str, float]:
    return parse(Metrics("m", tally or Tally(), lambda: status).text().decode())


def test_the_engines_figures() -> None:
    found = page(STATUS)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["twinspark_pool_prefix_tokens"] == 250
    assert found["vllm:spec_decode_num_drafts_total"] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 22
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 11
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total{1}"] == 3
    assert found["twinspark_draft_tokens_per_pos_total{2}"] == 4
    assert found["twinspark_draft_tokens_total{dspark}"] == 17
    assert found["twinspark_accepted_tokens_total{lookup}"] == 2
    assert found["twinspark_admission_waits_total{slot}"] == 4
    assert found["twinspark_prefix_lookups_total{miss}"] == 6
    assert found["twinspark_usable_bytes{1}"] == 222
    assert found["twinspark_rounds_total"] == 70


def test_what_is_not_counted_is_left_out() -> None:
    assert not any("num_requests_running" in name for name in page(None))
    bare = page(EngineStatus(running=0, waiting=0, rounds=0, slots_free=4))
    for word in ("spec_decode", "pool", "kv_cache", "usable", "lookups", "waits", "draft"):
        assert not any(word in name for name in bare), word
    assert bare["vllm:num_requests_running"] == 0


def test_there_are_no_created_series() -> None:
    assert not any("created" in name for name in page(STATUS))


def test_histogram_buckets_are_cumulative_and_closed() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total == 12.0


def test_prompts_that_may_not_be_reused_are_no_lookups() -> None:
    tally = Tally()
    tally.admit(GenerateRequest(request_id="a", prompt_ids=(1, 2, 3)), 2)
    tally.admit(GenerateRequest(request_id="b", prompt_ids=(1, 2), reuse=False), 0)
    scored = Sampling(prompt_logprobs=1)
    tally.admit(GenerateRequest(request_id="c", prompt_ids=(1,), sampling=scored), 0)
    found = page(None, tally)
    assert found["vllm:prompt_tokens_total"] == 6
    assert found["vllm:prefix_cache_queries_total"] == 3
    assert found["vllm:prefix_cache_hits_total"] == 2


@pytest.fixture
def engine(small_tokenizer) -> FakeEngine:
    return FakeEngine(small_tokenizer)


def get(live: LiveServer) -> dict[str, float]:
    reply = httpx.get(live.url + "/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(reply.text)


def test_counts_agree_with_usage(engine: FakeEngine, small_tokenizer) -> None:
    babble = engine.babble

    def script(request: GenerateRequest):
        yield Admitted(request_id=request.request_id, cached_tokens=5)
        yield from babble(request)

    engine.script = script
    usages = []
    with serve_in_thread(engine, small_tokenizer) as live:
        for number in range(4):
            body = {
                "messages": [{"role": "user", "content": f"question {number}"}],
                "max_tokens": [20, 20, 2, 1][number],
                "stream": number % 2 == 1,
                "stream_options": {"include_usage": True},
                "unheard_of": 1,
            }
            reply = httpx.post(live.url + "/v1/chat/completions", json=body, timeout=10)
            if number % 2:
                last = reply.text.strip().split("\n\n")[-2].removeprefix("data: ")
                usages.append(json.loads(last)["usage"])
            else:
                usages.append(reply.json()["usage"])
        found = get(live)
        assert httpx.get(live.url + "/v1/metrics").status_code == 200
    assert found["vllm:prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages)
    generated = sum(u["completion_tokens"] for u in usages)
    assert found["vllm:generation_tokens_total"] == generated
    assert found["vllm:prefix_cache_hits_total"] == 20
    assert found["vllm:request_success_total{length}"] >= 2
    ended = [v for k, v in found.items() if k.startswith("vllm:request_success_total")]
    assert sum(ended) == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert found[f"vllm:{name}_seconds_count"] == 4, name
    assert found["vllm:request_time_per_output_token_seconds_count"] == 3
    assert found["vllm:request_generation_tokens_sum"] == generated
    assert found["twinspark_ignored_fields_total"] == 4
    assert found["twinspark_http_responses_total{200}"] == 4


def test_failures_refusals_and_clients_that_leave(engine: FakeEngine, small_tokenizer) -> None:
    engine.script = lambda request: [
        Failed(request_id=request.request_id, kind="busy", message="full", retry_after_s=3.5)
    ]
    body = {"messages": [{"role": "user", "content": "x"}]}
    with serve_in_thread(engine, small_tokenizer) as live:
        for stream in (False, True):
            reply = httpx.post(
                live.url + "/v1/chat/completions", json=body | {"stream": stream}, timeout=10
            )
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "4")
            assert reply.json()["error"]["type"] == "rate_limit_error"
        assert httpx.get(live.url + "/nothing").status_code == 404
        engine.script = lambda request: ([300] for _ in range(10**6))
        engine.round_s = 0.002
        with httpx.stream(
            "POST", live.url + "/v1/chat/completions", json=body | {"stream": True}, timeout=10
        ) as reply:
            next(reply.iter_lines())
        wait_until(lambda: not engine.live)
        wait_until(lambda: get(live)["twinspark_clients_left_total"] == 1)
        found = get(live)
    assert found["twinspark_requests_failed_total{busy}"] == 2
    assert found["twinspark_requests_failed_total{engine}"] == 0
    assert found["twinspark_http_responses_total{429}"] == 2
    assert found["twinspark_http_responses_total{404}"] == 1
    assert found["vllm:request_success_total{abort}"] == 1
    assert found["vllm:prompt_tokens_total"] == 0
    assert found["vllm:generation_tokens_total"] > 0


def test_health_says_how_busy_the_engine_is(engine: FakeEngine, small_tokenizer) -> None:
    engine.status = STATUS
    with serve_in_thread(engine, small_tokenizer) as live:
        health = httpx.get(live.url + "/health").json()
    assert (health["running"], health["waiting"], health["slots_free"]) == (3, 2, 1)
    assert (health["pool_tokens"], health["pool_free_tokens"]) == (1000, 500)
    assert health["pool_prefix_tokens"] == 250 and health["usable_bytes"] == [111, 222]
