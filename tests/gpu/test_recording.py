"""What cannot be recorded is launched: the device, its streams and its memory go on as before."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from tests import tiny
from tests.small_tokenizer import small_tokenizer_json
from tests.unit.engine.test_rounds import replies, request
from tests.unit.model.harness import tiny_token_map

from twinspark.cache.staging import Landing, Staging
from twinspark.cache.upload import download, upload
from twinspark.config.engine import EngineConfig
from twinspark.config.paths import compiled_kernels_path
from twinspark.engine.core import Engine
from twinspark.engine.recording import Graph, Graphs, Launched
from twinspark.llm import LLM
from twinspark.messages import Sampling
from twinspark.model.loading import load_model
from twinspark.model.transformer import Transformer
from twinspark.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def doubled(x, out):
    """Work that leaves twice x in `out`, through memory of the recording."""

    def work():
        found = x * 2
        out.copy_(found)
        return (found,)

    return work


def check_records(graphs):
    """Several graphs of one pool, replayed in another order than they were recorded."""
    x, outs = torch.zeros(3, 1000, device=DEVICE), torch.zeros(3, 1000, device=DEVICE)
    made = [graphs.record(doubled(*pair)) for pair in zip(x, outs, strict=True)]
    assert all(isinstance(one, Graph) for one in made)
    for number in (2, 0, 1, 0, 2):
        x.fill_(number + 3)
        assert made[number].replay()[0].tolist() == [2 * number + 6] * 1000
        assert outs[number].tolist() == [2 * number + 6] * 1000


def test_work_that_reads_a_value(caplog):
    graphs, before = Graphs(DEVICE, nullcontext), torch.cuda.current_stream()
    x = torch.ones(4, device=DEVICE)
    torch.manual_seed(7)
    random = torch.rand(8, device=DEVICE), torch.rand(8, device=DEVICE)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(8, device=DEVICE), random[0])
    with caplog.at_level(logging.WARNING):
        found = graphs.record(lambda: (x * float(x.sum()),))
    assert isinstance(found, Launched)
    assert "cannot be recorded" in caplog.text
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.rand(8, device=DEVICE), random[1])  # they go on where they were
    x.fill_(3)
    assert found.replay()[0].tolist() == [36.0] * 4
    (there,) = upload([torch.arange(1000)], DEVICE)
    assert download(there).tolist() == list(range(1000))
    torch.cuda.empty_cache()
    check_records(Graphs(DEVICE, nullcontext))  # another engine of this process


@pytest.mark.parametrize("is_empty", [False, True], ids=["later", "at-once"])
def test_want_of_memory(caplog, is_empty):
    """Also before anything is recorded, of which torch then has something to say."""
    graphs, x = Graphs(DEVICE, nullcontext), torch.ones(4, device=DEVICE)

    def greedy():
        if torch.cuda.is_current_stream_capturing():
            if not is_empty:
                x.add(1)
            torch.empty(1 << 45, dtype=torch.uint8, device=DEVICE)
        return (x + 1,)

    check_records(graphs)
    with caplog.at_level(logging.WARNING):
        found = graphs.record(greedy)
    assert isinstance(found, Launched) and found.replay()[0].tolist() == [2.0] * 4
    assert "no memory is left to record" in caplog.text
    check_records(graphs)


def test_staged_numbers_go_there_and_come_back_in_order():
    """Numbers are written anew as soon as a result is there, as rounds do, on a busy device."""
    staging, landing = Staging(4096, DEVICE), Landing(64, 4, DEVICE)
    fields = staging.cut()
    fields.field(torch.int32, 64)
    field = fields.field(torch.int32, 64, 4)
    part = staging.part(256, fields.end)

    def work():
        part.bring()
        landing.put(field.tensor.flip(0) + 1)
        return ()

    recorded = Graphs(DEVICE, nullcontext).record(work)
    assert isinstance(recorded, Graph)
    for number in range(300):
        field.array[:] = torch.arange(number, number + 256).view(64, 4).numpy()
        torch.cuda._sleep(100_000)  # so that all that follows is still to come
        recorded.replay()
        landing.mark()
        torch.cuda._sleep(100_000)  # as a draft pass that reads the rows
        landing.settle() if number % 2 else landing.wait()
        wanted = torch.arange(number, number + 256).view(64, 4).flip(0) + 1
        assert landing.array.tolist() == wanted.tolist()
        if number % 50 == 0:
            assert landing.tensor.tolist() == wanted.tolist()


def test_pinned_memory_becomes_nobody_elses_before_it_is_written():
    """An engine may go while a pass that nobody wants still runs."""
    landing, ones = Landing(64, 4, DEVICE), torch.ones(64, 4, dtype=torch.int32, device=DEVICE)
    landing.put(ones)  # kernels are loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    landing.put(ones)
    del landing
    others = [torch.zeros(64, 4, dtype=torch.int32, pin_memory=True) for _ in range(4)]
    torch.cuda.synchronize()
    assert not any(other.any() for other in others)


def test_a_thread_may_begin_with_a_recording(caplog):
    """It has no context of the device yet, and a driver would not launch its first kernel."""
    prompt, sampling = "def add(a, b):", Sampling(seed=7, max_tokens=24)
    with LLM.demo(device="cuda", slots=2, max_context_tokens=2048) as llm:
        with caplog.at_level(logging.WARNING, logger="twinspark"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(llm.engine.prepare).result()
            assert llm.engine._runner._rounds.recorded and not caplog.records
            found = pool.submit(llm.generate, prompt, sampling).result().token_ids
        assert llm.generate(prompt, sampling).token_ids == found


def test_an_engine_whose_rounds_cannot_be_recorded(monkeypatch, caplog):
    """It warns, and replies are the same."""
    sampling = Sampling(seed=7, max_tokens=24, temperature=0.9)
    prompts = ["def add(a, b):", "Once upon a time there was"]
    settings = {"device": "cuda", "slots": 2, "max_context_tokens": 2048}
    with LLM.demo(**settings) as llm:
        wanted = [reply.token_ids for reply in llm.generate_many(prompts, sampling)]
    decode = Transformer.decode

    def peeking(self, round_, caches):
        logits_TV = decode(self, round_, caches)
        assert logits_TV.shape[0] > 0 and float(logits_TV[0, 0]) < 1e9
        return logits_TV

    monkeypatch.setattr(Transformer, "decode", peeking)
    with caplog.at_level(logging.WARNING, logger="twinspark"), LLM.demo(**settings) as llm:
        found = [reply.token_ids for reply in llm.generate_many(prompts, sampling)]
    assert found == wanted
    assert caplog.text.count("cannot be recorded") == 1


@pytest.mark.slow  # plain experts are multiplied one by one, in many small launches
def test_a_pack_whose_experts_are_sorted_on_the_host():
    """Plain matrices of experts: their numbers are read on the host, so nothing can be recorded."""
    model = load_model(
        tiny.plain_path(), token_map=tiny_token_map(), device=DEVICE,
        kernel_cache=compiled_kernels_path(),
    )  # fmt: skip
    config = EngineConfig(
        max_context_tokens=112, page_tokens=16, prefill_chunk=24, slots=2, lookup=False
    )
    found = []
    for is_eager in (False, True):
        engine = Engine(model, Tokenizer(small_tokenizer_json()), config)
        assert engine._runner._rounds is not None
        if is_eager:
            engine._runner._rounds = None
        found.append(replies(engine, request(0), request(1)))
    assert found[0] == found[1] and all(found[0].values())
