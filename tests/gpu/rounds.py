"""Decode rounds and draft blocks in captured graphs, for tests: what the engine does, by hand."""

import torch
from tests.unit.model.harness import Session

from twinspark.cache.upload import pack_bytes, unpack_bytes
from twinspark.model.decode import DecodeRound, DraftRound, host_round
from twinspark.model.step import Span, StepInput


def step_of(session, parts):
    """Rows of several slots as a step, not run; the session takes their ids."""
    spans, flat, history = [], [], []
    for slot, ids in parts.items():
        spans.append(Span(slot=slot, first=len(session.ids[slot]), count=len(ids)))
        history.append(tuple(session.ids[slot][-3:]))
        flat += ids
        session.ids[slot] += ids
    return StepInput(spans=tuple(spans), ids_T=flat, history=tuple(history))


class Decoder:
    """`Transformer.decode` over buffers of one size, eager or captured."""

    def __init__(self, session: Session, size: int, most_tokens: int, *, captured: bool) -> None:
        self.session, self.size = session, size
        model, width = session.model, {}
        for layer in model.config.engram_layer_ids:
            columns = (model.config.engram_max_ngram_size - 1) * model.config.engram_n_heads
            width[layer] = columns * model.config.engram_head_dim
        self.like = [torch.zeros(size, dtype=torch.int32) for _ in range(3)]
        self.like += [torch.zeros(size, w, dtype=torch.bfloat16) for w in width.values()]
        self.buffer = pack_bytes(self.like).to(model.device)
        self._fill(torch.tensor([-1] * size, dtype=torch.int32), 2)
        ids, positions, slots, *engram = unpack_bytes(self.buffer, self.like)
        self.round = DecodeRound(ids, positions, slots, tuple(engram), most_tokens)
        self.graph = None
        if captured:
            self.graph, self.logits = capture(lambda: model.decode(self.round, session.caches))

    def _fill(self, values, number):
        unpack_bytes(self.buffer, self.like)[number].copy_(values)

    def run(self, parts):
        """Logits of all rows of `parts`, by slot."""
        session, model = self.session, self.session.model
        step = step_of(session, parts)
        packed = host_round(step, model.engram_rows(step), self.size)
        session.caches.starts_S  # noqa: B018 - brought to the device before the round
        self.buffer.copy_(pack_bytes(packed))
        if self.graph is None:
            logits = model.decode(self.round, session.caches)
        else:
            self.graph.replay()
            logits = self.logits.clone()
        found, row = {}, 0
        for slot, ids in parts.items():
            found[slot] = logits[row : row + len(ids)]
            row += len(ids)
        return found


class Drafter:
    """`Transformer.draft_block` over buffers of one size, captured."""

    def __init__(self, session: Session, size: int) -> None:
        model = session.model
        self.like = [torch.zeros(size, dtype=torch.int32) for _ in range(3)]
        self.buffer = pack_bytes(self.like).to(model.device)
        unpack_bytes(self.buffer, self.like)[2].fill_(-1)
        self.round = DraftRound(*unpack_bytes(self.buffer, self.like))
        self.size = size
        self.graph, self.found = capture(lambda: model.draft_block(self.round, session.caches))

    def run(self, requests):
        """Hidden rows and base logits of the requests' blocks."""
        columns = [torch.zeros(self.size, dtype=torch.int32) for _ in range(3)]
        columns[2].fill_(-1)
        for number, r in enumerate(requests):
            for column, value in zip(columns, (r.token, r.position, r.slot), strict=True):
                column[number] = value
        self.buffer.copy_(pack_bytes(columns))
        self.graph.replay()
        return tuple(tensor.clone() for tensor in self.found)


def capture(work):
    """Run once to load all kernels, then record: (graph, what `work` returned)."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return graph, found
