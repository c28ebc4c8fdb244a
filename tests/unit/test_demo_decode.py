"""The twin's cached steps against its whole forward: the same logits at every position."""

import torch
from tests.unit.test_demo_long import made_twin
from tools.demo import graphs
from tools.demo.decode import Decoder, continue_texts, generate

LENGTH = 45


def test_steps_equal_the_whole_forward():
    """Beyond window, index_topk and candidates of TINY, from stale caches."""
    twin = made_twin()
    ids = torch.randint(3, 498, (3, LENGTH), generator=torch.Generator().manual_seed(8))
    wanted, _ = twin.logits(ids, exact=True)
    decoder = Decoder(twin, 3, LENGTH)
    for first in (0, 1):  # the second time over caches full of other text
        decoder.start()
        other = ids.flip(1) if first == 0 else ids
        for p in range(LENGTH):
            decoder.token.copy_(other[:, p])
            logits = decoder.run()
            if first:
                assert (logits - wanted[:, p]).abs().max() < 1e-9, p


def test_greedy_text_is_the_argmax_of_the_whole_forward():
    twin = made_twin()
    prompts = [[0, 5, 6, 7, 8], [0, 9], list(range(20, 31))]
    texts = generate(twin, prompts, 6)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[: len(prompt)] == prompt and len(text) == len(prompt) + 6
        logits, _ = twin.logits(torch.tensor([text]), exact=True)
        best = logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == text[len(prompt) :]


class Pretended:
    """A captured graph as far as what it changes goes: the capture changes nothing, replays do."""

    def __init__(self, run):
        self.run = run

    def replay(self):
        self.run.result = self.run.fn()


def test_ordinary_steps_before_a_capture_leave_no_trace(monkeypatch):
    def capture(run):
        for _ in range(graphs.WARMUPS):
            run.fn()
        run.graph = Pretended(run)

    monkeypatch.setattr(graphs.Captured, "_capture", capture)
    twin = made_twin()
    prompts = [[0, 5, 6, 7, 8], [0, 9, 11, 12, 4]]
    assert generate(twin, prompts, 20, graph=True) == generate(twin, prompts, 20)


def test_sampled_rows_differ_and_greedy_rows_do_not():
    twin = made_twin()
    torch.manual_seed(4)
    ids = torch.full((4, 12), 7)
    heat = torch.tensor([0.0, 0.0, 1.0, 1.0])
    texts = continue_texts(Decoder(twin, 4, 12), ids, torch.full((4,), 3), heat)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[2], texts[3])
    assert torch.equal(texts[:, :3], ids[:, :3])
