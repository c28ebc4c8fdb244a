"""DSpark: draft blocks that guess the next tokens from taps of the backbone.

Owns the draft context (model specification 5.1, 5.2) and the draft pass (5.3); what is accepted is
the engine's business. Letters: T rows, n requests times B block rows; C streams, D hidden, H head
size, W window, R Markov rank, V vocabulary. Read next: `layer.py`, `csa.py`.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from twinspark.cache.layout import CacheLayout
from twinspark.cache.upload import download, upload
from twinspark.cache.view import Caches
from twinspark.kernels.cache_rows.source import RowSource
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.head import markov_rows, why_not_markov_rows
from twinspark.kernels.plain.norm import rms_norm_rows
from twinspark.model.attention_weights import AttentionWeights, Gathered, Listed, Lists
from twinspark.model.decode import DraftRound
from twinspark.model.joined import JoinedLinears
from twinspark.model.layer import Layer
from twinspark.model.linear import ModelLoader
from twinspark.model.rows import Angles, Rows
from twinspark.model.step import DraftRequest, DraftResult
from twinspark.model.streams import Streams

Pick = Callable[[int, int, Tensor], int]
"""(request number, slot j of the block, logits_V fp32) -> token."""


class DSpark:
    """All draft blocks, with the Markov and confidence heads of the last one."""

    def __init__(
        self,
        loader: ModelLoader,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        """Load mtp.*; embedding and head are the backbone's."""
        config = loader.config
        count, first = config.num_nextn_predict_layers, config.num_hidden_layers
        last = f"mtp.{count - 1}"
        self._config = config
        self._embed, self._head = embed, head
        self._is_placed = loader.is_fused
        self._main_proj = loader.linear("mtp.0.main_proj")
        self._main_norm_D = loader.plain("mtp.0.main_norm.weight")
        self._norm_D = loader.plain(f"{last}.norm.weight")
        self._layers = [Layer(loader, f"mtp.{i}", first + i) for i in range(count)]
        self._attention = [AttentionWeights(loader, f"mtp.{i}.attn", 0) for i in range(count)]
        self._windows = JoinedLinears([weights.window_product for weights in self._attention])
        self._markov_embed_VR = loader.plain(f"{last}.markov_head.embed.weight", loader.dtype)
        head_name = f"{last}.markov_head.head.weight"
        self._markov_head = loader.plain_linear(head_name)
        self._markov_head_VR = loader.plain(head_name, loader.dtype) if loader.is_fused else None
        self._confidence = loader.plain_linear(f"{last}.confidence_head.proj.weight")

    def write_context(self, taps: Tensor, rows: Rows, caches: Caches) -> None:
        """Write every block's context rows (5.2) for the rows that stay in a window ring.

        Args:
            taps: [T, taps * D] stream means entering the tap layers, not normed.
            rows: their positions and slots.
            caches: written.
        """
        starts = [0] * caches.layout.num_slots
        inv_freq, targets_T = self._attention[0].inv_freq, None
        if rows.places is not None and rows.reads_rings:
            targets_T, angles = rows.places.written_T, rows.angles(inv_freq)
        elif rows.places is not None:
            staged = rows.staged(starts)
            targets_T, taps = staged.written_targets, taps[staged.written]
            angles = Angles(rows.positions_T[staged.written], inv_freq)
        else:
            plan = rows.window(starts)
            taps, angles = taps[plan.written], Angles(rows.positions_T[plan.written], inv_freq)
        main_TD = self._main_proj(taps)
        main_TD = rms_norm_rows(main_TD, self._main_norm_D, eps=self._config.rms_norm_eps)
        rings = [
            caches.window(self._config.num_hidden_layers + i) for i in range(len(self._attention))
        ]
        if targets_T is None:
            for ring, attention in zip(rings, self._attention, strict=True):
                ring.write(plan.targets, attention.key_value(main_TD, angles))
            return
        for ring, attention, raw_TH in zip(
            rings, self._attention, self._windows(main_TD), strict=True
        ):
            attention.store_window(raw_TH, angles, ring.source, targets_T)

    def draft(
        self, requests: Sequence[DraftRequest], caches: Caches, pick: Pick | None
    ) -> list[DraftResult]:
        """One draft pass over several requests (5.3); without `pick` nothing is drafted."""
        if not requests:
            return []
        columns = zip(*((r.token, r.position, r.slot) for r in requests), strict=True)
        parts = [torch.tensor(column, dtype=torch.int32) for column in columns]
        hidden_TD, base_TV = self.block(DraftRound(*upload(parts, caches.device)), caches)
        if pick is None:  # a following rank: the walk needs nothing of it
            return []
        return self.walk(requests, hidden_TD, base_TV, pick)

    def block(self, round_: DraftRound, caches: Caches) -> tuple[Tensor, Tensor]:
        """Run the draft blocks: hidden [n * B, D] before the norm and base logits [n * B, V].

        Reads no value on the host.
        """
        config = self._config
        reader = _BlockReader(
            round_, config.dspark_block_size, caches.layout, self._attention[0].inv_freq
        )
        ids_nB = torch.full_like(reader.block_nB, config.dspark_noise_token_id)
        ids_nB[:, 0] = round_.tokens_n
        streams = Streams(self._embed(ids_nB.view(-1)))
        for i, layer in enumerate(self._layers):
            streams = layer(streams, self._attend(i, reader, caches))
        last = streams.enter(self._norm_D, eps=config.rms_norm_eps, keep_collapsed=True)
        assert last.x_TD is not None and last.collapsed_TD is not None
        return last.collapsed_TD, self._head(last.x_TD)

    def _attend(self, i: int, reader: "_BlockReader", caches: Caches) -> Callable[[Tensor], Tensor]:
        attention = self._attention[i]
        ring = caches.window(self._config.num_hidden_layers + i)

        def attend(x_TD: Tensor) -> Tensor:
            # every query of a block reads the same list: context, then the whole block
            lists: Lists
            if self._is_placed:
                block_TH, qr_TR = attention.placed_block(x_TD, reader.angles)
                block = RowSource("plain", block_TH)
                lists = Listed(
                    ((ring.source, reader.context_TW), (block, reader.spread(reader.block_nB)))
                )
            else:
                block_TH, qr_TR = (
                    attention.key_value(x_TD, reader.angles), attention.query_rank(x_TD)
                )  # fmt: skip
                context_nWH = ring.read(reader.context_nW.clamp(min=0))
                block_nBH = block_TH.view(*reader.block_nB.shape, -1)
                rows = torch.cat([context_nWH, block_nBH], dim=1).to(compute_dtype(x_TD.dtype))
                lists = Gathered(reader.spread(rows), reader.spread(reader.valid_nK))
            q_TNH, _ = attention.queries(qr_TR)
            return attention.attend(q_TNH, reader.angles, lists)

        return attend

    def walk(
        self, requests: Sequence[DraftRequest], hidden_TD: Tensor, base_TV: Tensor, pick: Pick
    ) -> list[DraftResult]:
        """Choose the tokens of every block, one slot after another, from what `block` gave."""
        size = self._config.dspark_block_size
        tokens = [[r.token] for r in requests]
        first_rows = torch.arange(len(requests), device=base_TV.device) * size
        memory = []
        for j in range(size):
            (entering,) = upload([torch.tensor([t[j] for t in tokens])], base_TV.device)
            m_nR = self._markov_embed_VR[entering]
            logits_nV = base_TV[first_rows + j] + self._markov_head.wide(m_nR)
            for number, row in enumerate(download(logits_nV)):
                tokens[number].append(pick(number, j, row))
            memory.append(m_nR)
        m_TR = torch.stack(memory, dim=1).view(len(hidden_TD), -1)
        # pre-norm hidden first, then the Markov row of the token entering the slot (5.3)
        confidence = self._confidence.wide(torch.cat([hidden_TD, m_TR], dim=1))
        return [
            DraftResult(tokens=t[1:], confidence=c)
            for t, c in zip(tokens, confidence.view(-1, size).tolist(), strict=True)
        ]

    @property
    def walks_on_device(self) -> bool:
        """Whether there is `walk_by`: where rows are placed, and the head is of a kind it takes."""
        head_VR = self._markov_head_VR
        return head_VR is not None and why_not_markov_rows(self._markov_embed_VR, head_VR) is None

    def walk_by(
        self,
        tokens_n: Tensor,
        hidden_TD: Tensor,
        base_TV: Tensor,
        choose: Callable[[int, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """`walk` without the host, for work that is recorded.

        Args:
            tokens_n: int32, the tokens before the blocks.
            hidden_TD: of `block`.
            base_TV: of `block`.
            choose: (slot j of the block, logits [n, V]) to int32 [n] tokens, -1 for no choice.

        Returns:
            int32 [n, B] tokens and fp32 [n, B] confidence.
        """
        assert self._markov_head_VR is not None
        size, entering_n = self._config.dspark_block_size, tokens_n
        base_nBV = base_TV.view(len(tokens_n), size, -1)
        tokens, memory = [], []
        for j in range(size):
            memory.append(self._markov_embed_VR[entering_n.clamp(min=0).long()])
            logits_nV = markov_rows(
                base_nBV[:, j], entering_n, self._markov_embed_VR, self._markov_head_VR
            )
            entering_n = choose(j, logits_nV)
            tokens.append(entering_n)
        m_TR = torch.stack(memory, dim=1).view(len(hidden_TD), -1)
        confidence = self._confidence.wide(torch.cat([hidden_TD, m_TR], dim=1))
        return torch.stack(tokens, dim=1), confidence.view(-1, size)


class _BlockReader:
    """Positions and lists of a draft pass; all blocks share them.

    Attributes:
        angles: of all rows.
        context_nW: int32 ring rows before each block, -1 for none.
        block_nB: int32 rows of the pass that are in each block.
    """

    def __init__(
        self, round_: DraftRound, size: int, layout: CacheLayout, inv_freq: Tensor
    ) -> None:
        start_n1, slot_n1 = round_.positions_n[:, None], round_.slots_n[:, None]
        device, num = start_n1.device, len(start_n1)
        inside_B = torch.arange(size, dtype=torch.int32, device=device)
        self.angles = Angles((start_n1 + inside_B).view(-1), inv_freq)
        self.block_nB = torch.arange(num * size, dtype=torch.int32, device=device).view(num, size)
        before_nW = start_n1 + torch.arange(-layout.window, 0, dtype=torch.int32, device=device)
        ring_nW = slot_n1 * layout.window_rows + before_nW % layout.window_rows
        self.context_nW = ring_nW.masked_fill((before_nW < 0) | (slot_n1 < 0), -1)

    @cached_property
    def context_TW(self) -> Tensor:
        """The context of each row's block."""
        return self.spread(self.context_nW)

    @cached_property
    def valid_nK(self) -> Tensor:
        """Which entries of a list exist: some of the context, all of the block."""
        return torch.cat([self.context_nW >= 0, self.block_nB >= 0], dim=1)

    def spread(self, lists: Tensor) -> Tensor:
        """One for each request to one for each row."""
        return lists.repeat_interleave(self.block_nB.shape[1], dim=0)
