"""Runs plans on the model: numbers in, logits and drafts out. Every rank has one.

Owns the caches' allocation and the hand-over between host and device; decides nothing. Static
buffers and captured graphs will live here. Read next: `model/transformer.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from twinspark.config.model import ModelConfig
from twinspark.engine.plan import StepPlan
from twinspark.model.step import DraftRequest, DraftResult, Span, StepInput, StepOutput

Logits = npt.NDArray[np.float32]


class Model(Protocol):
    """What the engine needs of a model; `model.transformer.Transformer` is the one that counts."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and roles."""

    def new_caches(self, num_slots: int, max_tokens: int) -> Any:
        """State for `num_slots` requests of up to `max_tokens` positions each."""

    def forward(self, step: StepInput, caches: Any) -> StepOutput:
        """Run rows; their state is in `caches` afterwards."""

    def draft(
        self,
        requests: Sequence[DraftRequest],
        caches: Any,
        pick: Callable[[int, int, Tensor], int],
    ) -> list[DraftResult]:
        """Propose tokens; `pick(request_idx, j, logits_V)` chooses draft j of a request."""


class Runner:
    """The model with the caches of all slots."""

    def __init__(self, model: Model, *, num_slots: int, max_tokens: int) -> None:
        self._model = model
        self._caches = model.new_caches(num_slots, max_tokens)

    def run(self, plan: StepPlan) -> dict[int, Logits]:
        """Run a plan.

        Returns:
            slot -> [rows of its window, V] fp32.
        """
        planned = (*plan.windows, *plan.pieces)
        num_window_rows = sum(len(rows.ids) for rows in plan.windows)
        step = StepInput(
            spans=tuple(
                Span(slot=r.slot, first=r.first, count=len(r.ids), prompt_end=r.prompt_end)
                for r in planned
            ),
            ids_T=[token for rows in planned for token in rows.ids],
            history=tuple(rows.history for rows in planned),
            logit_rows=list(range(num_window_rows)),
        )
        out = self._model.forward(step, self._caches)
        logits_RV = to_host(out.logits_RV)
        assert logits_RV.shape[0] == num_window_rows, "a window row has no logits"
        by_slot, start = {}, 0
        for rows in plan.windows:
            by_slot[rows.slot] = logits_RV[start : start + len(rows.ids)]
            start += len(rows.ids)
        return by_slot

    def draft(
        self, requests: Sequence[DraftRequest], pick: Callable[[int, int, Logits], int]
    ) -> list[DraftResult]:
        """Let the draft blocks propose; `pick` sees host logits [V] fp32."""
        return self._model.draft(
            requests, self._caches, lambda n, j, logits_V: pick(n, j, to_host(logits_V))
        )


def to_host(logits: Tensor) -> Logits:
    """Logits as fp32 in host memory; shares memory where it can."""
    array: Logits = logits.detach().float().cpu().numpy()
    return array
