"""DSpark: draft blocks that guess the next tokens from taps of the backbone.

Owns the draft context (model specification 5.1, 5.2) and the draft pass (5.3); what is accepted is
the engine's business. Letters: T rows, n requests times B block rows; C streams, D hidden, H head
size, W window, R Markov rank, V vocabulary. Read next: `layer.py`, `csa.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twinspark.cache.view import Caches
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.hyper_connections import collapse
from twinspark.kernels.rms_norm import rms_norm
from twinspark.model.csa import AttentionWeights
from twinspark.model.hyper_connections import first_pre
from twinspark.model.layer import Layer
from twinspark.model.linear import ModelLoader
from twinspark.model.rows import Angles, Rows
from twinspark.model.step import DraftRequest, DraftResult

Pick = Callable[[int, int, Tensor], int]
"""(request number, slot j of the block, logits_V fp32) -> token."""


class DSpark:
    """All draft blocks, with the Markov and confidence heads of the last one."""

    def __init__(
        self,
        loader: ModelLoader,
        embed: Callable[[Sequence[int]], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        """Load mtp.*; embedding and head are the backbone's."""
        config = loader.config
        count, first = config.num_nextn_predict_layers, config.num_hidden_layers
        last = f"mtp.{count - 1}"
        self._config = config
        self._embed, self._head = embed, head
        self._main_proj = loader.linear("mtp.0.main_proj")
        self._main_norm_D = loader.plain("mtp.0.main_norm.weight")
        self._norm_D = loader.plain(f"{last}.norm.weight")
        self._layers = [Layer(loader, f"mtp.{i}", first + i) for i in range(count)]
        self._attention = [AttentionWeights(loader, f"mtp.{i}.attn", 0) for i in range(count)]
        self._markov_embed_VR = loader.plain(f"{last}.markov_head.embed.weight", loader.dtype)
        self._markov_head = loader.plain_linear(f"{last}.markov_head.head.weight")
        self._confidence = loader.plain_linear(f"{last}.confidence_head.proj.weight")

    def write_context(self, taps: Tensor, rows: Rows, caches: Caches) -> None:
        """Write every block's context rows (5.2) for the rows that stay in a window ring.

        Args:
            taps: [T, taps * D] stream means entering the tap layers, not normed.
            rows: their positions and slots.
            caches: written.
        """
        plan = rows.window([0] * caches.layout.num_slots)
        angles = Angles(rows.positions_T[plan.written], self._attention[0].inv_freq)
        main_TD = self._main_proj(taps[plan.written])
        main_TD = rms_norm(main_TD, self._main_norm_D, eps=self._config.rms_norm_eps)
        for i, attention in enumerate(self._attention):
            context_TH = attention.key_value(main_TD, angles)
            caches.window(self._config.num_hidden_layers + i).write(plan.targets, context_TH)

    def draft(
        self, requests: Sequence[DraftRequest], caches: Caches, pick: Pick | None
    ) -> list[DraftResult]:
        """One draft pass over several requests (5.3); without `pick` nothing is drafted."""
        if not requests:
            return []
        config = self._config
        size = config.dspark_block_size
        noise = [config.dspark_noise_token_id] * (size - 1)
        streams_TD = self._embed([i for r in requests for i in (r.token, *noise)])
        x_TCD = streams_TD.unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre_TC = first_pre(len(x_TCD), config.hc_mult, torch.float32).to(self._main_norm_D.dtype)
        reader = _BlockReader(requests, size, caches, self._attention[0].inv_freq)
        for i, layer in enumerate(self._layers):
            x_TCD, pre_TC = layer(x_TCD, pre_TC, self._attend(i, reader, caches))
        hidden_TD = collapse(x_TCD, pre_TC)
        base_TV = self._head(rms_norm(hidden_TD, self._norm_D, eps=config.rms_norm_eps))
        if pick is None:  # a following rank: the walk needs nothing of it
            return []
        return self._markov_walk(requests, hidden_TD, base_TV, pick)

    def _attend(self, i: int, reader: "_BlockReader", caches: Caches) -> Callable[[Tensor], Tensor]:
        attention = self._attention[i]
        ring = caches.window(self._config.num_hidden_layers + i)

        def attend(x_TD: Tensor) -> Tensor:
            block_TH = attention.key_value(x_TD, reader.angles)
            context = ring.read(reader.context)  # [n, W, H]
            block = block_TH.view(len(context), -1, block_TH.shape[-1])
            # every query of a block reads the same list: context, then the whole block
            lists = torch.cat([context, block], dim=1).to(compute_dtype(x_TD.dtype))
            qr_TR = attention.query_rank(x_TD)
            return attention.attend(qr_TR, reader.angles, lists[reader.owner_T], reader.valid_TK)

        return attend

    def _markov_walk(
        self, requests: Sequence[DraftRequest], hidden_TD: Tensor, base_TV: Tensor, pick: Pick
    ) -> list[DraftResult]:
        size = self._config.dspark_block_size
        tokens = [[r.token] for r in requests]
        first_rows = torch.arange(len(requests)) * size
        memory = []
        for j in range(size):
            entering = torch.tensor([t[j] for t in tokens])
            m_nR = self._markov_embed_VR[entering]
            logits_nV = base_TV[first_rows + j] + self._markov_head.wide(m_nR)
            for number, row in enumerate(logits_nV):
                tokens[number].append(pick(number, j, row))
            memory.append(m_nR)
        m_TR = torch.stack(memory, dim=1).view(len(hidden_TD), -1)
        # pre-norm hidden first, then the Markov row of the token entering the slot (5.3)
        confidence = self._confidence.wide(torch.cat([hidden_TD, m_TR], dim=1))
        return [
            DraftResult(tokens=t[1:], confidence=c)
            for t, c in zip(tokens, confidence.view(-1, size).tolist(), strict=True)
        ]


class _BlockReader:
    """Positions, context rows and validity of a draft pass; all blocks share them."""

    def __init__(
        self, requests: Sequence[DraftRequest], size: int, caches: Caches, inv_freq: Tensor
    ) -> None:
        layout = caches.layout
        start_n = torch.tensor([r.position for r in requests])[:, None]
        slot_n = torch.tensor([r.slot for r in requests])[:, None]
        self.angles = Angles((start_n + torch.arange(size)).view(-1), inv_freq)
        self.owner_T = torch.arange(len(requests)).repeat_interleave(size)
        before = start_n + torch.arange(-layout.window, 0)
        self.context = slot_n * layout.window_rows + before % layout.window_rows
        valid = torch.cat([before >= 0, torch.ones(len(requests), size, dtype=torch.bool)], dim=1)
        self.valid_TK = valid[self.owner_T]
