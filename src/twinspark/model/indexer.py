"""The indexer of an index source: which long-range entries each row reads.

Owns scores, candidates and selection of one layer (model specification 3.6, 3.7); ops are in
`kernels/index_search.py`. Letters: T rows, N index heads, H index head size, L entries, K selected,
B candidate blocks. Read next: `csa.py`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinspark.cache.pages import PagedRows
from twinspark.cache.view import Caches
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.index import Wanted, select_entries
from twinspark.kernels.index_search import Search, search
from twinspark.kernels.rounding import qdq4x32
from twinspark.model.attention_weights import Listed, Lists
from twinspark.model.linear import Linear, ModelLoader
from twinspark.model.rows import Rows


@dataclass
class CallState:
    """Scratch of one forward call; nothing here outlives it (model specification 4.1).

    Attributes:
        selections: what the newest selection of an index source lets rows read.
        candidates: the candidate source's blocks [T, B] by slot, one row a running row of the
            slot; a slot whose rows may choose from all blocks is not there.
        blocks_TB: the same for all rows at once where rows are placed; None is all blocks.
    """

    selections: dict[int, Lists] = field(default_factory=dict)
    candidates: dict[int, Tensor] = field(default_factory=dict)
    blocks_TB: Tensor | None = None

    def narrow(self, places: Tensor, kept: Rows) -> None:
        """Keep what the remaining rows need; a slot's remaining rows are its last ones."""
        self.selections = {k: s.narrow(places) for k, s in self.selections.items()}
        self.blocks_TB = None if self.blocks_TB is None else self.blocks_TB[places]
        counts = {s.slot: s.count for s in kept.segments}
        self.candidates = {
            slot: blocks[len(blocks) - counts[slot] :]
            for slot, blocks in self.candidates.items()
            if slot in counts
        }


class Indexer:
    """Weights of one index source; keys are its kv source's."""

    def __init__(self, loader: ModelLoader, layer: int) -> None:
        """Load the indexer of backbone layer `layer`."""
        config, prefix = loader.config, f"layers.{layer}.attn.indexer"
        self._config = config
        self.layer = layer
        self.source = config.kv_source(layer)
        self.ratio = config.ratio(layer)
        self._inv_freq = loader.inv_freq(self.ratio)
        self._wq_b = loader.linear(f"{prefix}.wq_b")
        self._weights_proj = loader.plain_linear(f"{prefix}.weights_proj.weight")

    @property
    def queries(self) -> Linear:
        """The matrix that query ranks are multiplied by."""
        return self._wq_b

    def select(
        self, x_TD: Tensor, qr_TR: Tensor, rows: Rows, caches: Caches, call: CallState
    ) -> Tensor:
        """Entries of every row, [T, K] ascending, -1 padding last.

        A slot whose rows all see at most K entries takes them all, unscored: the result is the
        same (model specification 3.6).
        """
        limit = self._config.index_topk
        visible_T = rows.visible_T(self.ratio)
        places_K = torch.arange(limit, device=visible_T.device)
        entries_TK = torch.where(places_K < visible_T[:, None], places_K, -1)
        query = None
        first_row = 0
        for segment in rows.segments:
            part = slice(first_row, first_row + segment.count)
            first_row += segment.count
            longest = (segment.first + segment.count) // self.ratio
            if longest <= limit:
                continue
            if query is None:
                query = self._query(x_TD, qr_TR, rows)
            entries_TK[part] = self._select_slot(
                query[0][part], query[1][part], visible_T[part], segment.slot, longest,
                caches, call,
            )  # fmt: skip
        return entries_TK

    def select_placed(
        self,
        x_TD: Tensor,
        qr_TR: Tensor,
        rows: Rows,
        caches: Caches,
        call: CallState,
        *,
        index_TO: Tensor | None = None,
    ) -> Listed:
        """The same where rows are placed: the chosen compressed rows where they lie.

        `index_TO` is the product of query ranks with `queries`, None if it is still to be made.
        """
        if index_TO is None:
            index_TO = self._wq_b(qr_TR)
        config, angles = self._config, rows.angles(self._inv_freq)
        table, keys = caches.rows(self.source), caches.keys(self.source)
        assert rows.places is not None and isinstance(table, PagedRows)
        assert isinstance(keys, PagedRows)
        is_source = self.layer == config.candidate_source_layer_id
        is_bound = config.uses_candidates(self.layer)
        found = select_entries(
            index_TO.view(len(rows), config.index_n_heads, config.index_head_dim),
            self._weights_proj(x_TD),
            angles.cos_TP,
            angles.sin_TP,
            index_scale=config.index_scale,
            visible_T=rows.places.entries[self.ratio].visible_T,
            slots_T=rows.slots32_T,
            page_table=caches.page_table_SP,
            keys=keys.key_pages,
            wanted=Wanted(
                k=config.index_topk,
                max_entries=rows.most_entries(self.ratio),
                block_size=config.candidate_block_size if is_source or is_bound else 1,
                top_blocks=config.candidate_topk_blocks if is_source else 0,
                candidates_TB=call.blocks_TB if is_bound else None,
                scratch_bytes=caches.index_scratch_bytes,
            ),
        )
        if is_source:
            call.blocks_TB = found.blocks_TB
        return Listed(((table.source, found.physical_TK),))

    def _query(self, x_TD: Tensor, qr_TR: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        config = self._config
        q_TNH = self._wq_b(qr_TR).view(len(rows), config.index_n_heads, config.index_head_dim)
        q_TNH = qdq4x32(rows.angles(self._inv_freq).rotate(q_TNH))
        # rounded twice, as the reference does (model specification 3.6)
        w_TN = self._weights_proj(x_TD)
        w_TN = (w_TN.to(compute_dtype(w_TN.dtype)) * config.index_scale).to(w_TN.dtype)
        return q_TNH, w_TN

    def _select_slot(
        self,
        q_TNH: Tensor,
        w_TN: Tensor,
        visible_T: Tensor,
        slot: int,
        longest: int,
        caches: Caches,
        call: CallState,
    ) -> Tensor:
        config = self._config
        is_source = self.layer == config.candidate_source_layer_id
        is_bound = config.uses_candidates(self.layer)
        wanted = Search(
            k=config.index_topk,
            length=longest,
            block_size=config.candidate_block_size if is_source or is_bound else 1,
            top_blocks=config.candidate_topk_blocks if is_source else 0,
            candidates_TB=call.candidates.get(slot) if is_bound else None,
            scratch_bytes=caches.index_scratch_bytes,
        )
        found = search(q_TNH, w_TN, visible_T, caches.keys(self.source).of_slot(slot), wanted)
        if found.blocks_TB is not None:
            call.candidates[slot] = found.blocks_TB
        return found.entries_TK
