"""Runs the model over calibration text and gathers the Hessian of every matrix's inputs.

Owns which matrices share an input and how rare experts borrow from their layer. The model itself
is unchanged: a loader hands it matrices that show their inputs. Read next: hessian.py,
`model/linear.py`, pipeline.py.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.view import Caches
from twinspark.distributed.collectives import SingleRank
from twinspark.errors import ConfigError
from twinspark.model.linear import AnyMatrix, Linear, ModelLoader
from twinspark.model.loading import read_token_map
from twinspark.model.step import DraftRequest, Span, StepInput
from twinspark.model.transformer import Transformer
from twinspark.pack.reader import Pack
from twinspark.pack.weights import PackWeights, PlainMatrix
from twinspark.quantize.hessian import Hessian, HessianSum

_SLOTS = 8
_CHUNK = 32
_SIBLINGS = (
    (r"\.w3$", ".w1"),
    (r"^(layers\.\d+\.attn)\.(wkv|compressor\.wkv|compressor\.wgate)$", r"\1.wq_a"),
    (r"^(layers\.\d+\.attn)\.indexer\.wq_b$", r"\1.wq_b"),
)
_EXPERT = re.compile(r"^(.*\.ffn)\.experts\.\d+\.w[12]$")


def input_name(module: str) -> str:
    """The module whose recorded inputs are also those of `module`.

    Gate and up see one input, as do the projections of a backbone layer's x and of its query
    latent. A draft block's wkv also projects context rows, so it has its own.
    """
    for pattern, leader in _SIBLINGS:
        module = re.sub(pattern, leader, module)
    return module


@dataclass(frozen=True)
class Calibration:
    """What a calibration run found.

    Attributes:
        hessians: by the names `input_name` gives.
        rows: rows that really reached the module, by the same names.
        tokens: rows of the backbone.
        sequences: texts.
    """

    hessians: dict[str, Hessian]
    rows: dict[str, int]
    tokens: int
    sequences: int

    def of(self, module: str) -> Hessian | None:
        """The Hessian of a module's inputs, or None when no row reached it."""
        found = self.hessians.get(input_name(module))
        return found if found is not None and found.usable else None

    def share(self, module: str) -> float:
        """How often a routed expert acts, as a share of its layer's rows; 1 for all others."""
        match = _EXPERT.match(input_name(module))
        everyone = self.rows.get(f"{match[1]}.shared_experts.w1", 0) if match else 0
        if not everyone:
            return 1.0
        return self.rows.get(input_name(module), 0) / everyone


@dataclass(frozen=True)
class _NamedMatrix(PlainMatrix):
    """A plain matrix that knows its module."""

    module: str


class _ShownLinear(Linear):
    """A matrix that shows its inputs before it multiplies."""

    def __init__(self, linear: Linear, show: Callable[[Tensor], None]) -> None:
        super().__init__(linear.matrix)
        self._show = show

    def wide(self, x_TK: Tensor) -> Tensor:
        """As Linear.wide."""
        self._show(x_TK)
        return super().wide(x_TK)


class CalibrationLoader(ModelLoader):
    """Loads a plain model, whole matrices only, and gathers what each of them multiplies."""

    def __init__(self, checkpoint: Pack) -> None:
        """One rank, one shard: every matrix is whole, wo_a but for its groups."""
        super().__init__(
            PackWeights(checkpoint), group=SingleRank(), virtual_shards=1, dtype=torch.bfloat16
        )
        self.sums: dict[str, HessianSum] = {}

    def matrix(
        self, prefix: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> AnyMatrix:
        """As ModelLoader.matrix, with its name.

        Raises:
            ConfigError: the matrix is quantized already.
        """
        found = super().matrix(prefix, rows=rows, cols=cols)
        if not isinstance(found, PlainMatrix):
            raise ConfigError(
                f"{prefix} is an EXL3 matrix already; calibrate the checkpoint it was made from"
            )
        module = prefix
        if prefix.endswith(".wo_a") and cols is not None:
            module = f"{prefix}.slice.{cols.start // self.config.o_lora_rank}"
        return _NamedMatrix(found.weight, module)

    def prepare(self, matrix: AnyMatrix) -> Linear:
        """As ModelLoader.prepare; named matrices show their inputs."""
        linear = super().prepare(matrix)
        if not isinstance(matrix, _NamedMatrix) or input_name(matrix.module) != matrix.module:
            return linear
        gathered = self.sums.setdefault(matrix.module, HessianSum(matrix.weight.shape[1]))
        return _ShownLinear(linear, gathered.add)


def calibrate(
    checkpoint: Pack,
    sequences: Sequence[Sequence[int]],
    *,
    token_map: npt.NDArray[np.integer] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Calibration:
    """Gather Hessians over token sequences.

    Several sequences run side by side in chunks; after each chunk the draft blocks run once a
    sequence, so that they see what they will see when serving.

    Args:
        checkpoint: a pack of plain matrices.
        sequences: token ids; those beyond the model's longest context are cut.
        token_map: the Engram token map; derived from the checkpoint's tokenizer when None.
        on_progress: called with fractions 0..1.

    Raises:
        ConfigError: a matrix is quantized already, or there is no text.
    """
    if not any(sequences):
        raise ConfigError("calibration needs at least one token; the calibration text is empty")
    config = checkpoint.config
    if config.engram_layer_ids and token_map is None:
        token_map = read_token_map(checkpoint.tokenizer_path, config.vocab_size)
    loader = CalibrationLoader(checkpoint)
    limit = config.max_position_embeddings
    texts = [list(ids[:limit]) for ids in sequences if len(ids)]
    total, done = sum(map(len, texts)), 0
    with torch.inference_mode():
        model = Transformer(loader, token_map)
        for first in range(0, len(texts), _SLOTS):
            group = texts[first : first + _SLOTS]
            _run_group(model, group)
            done += sum(map(len, group))
            if on_progress is not None:
                on_progress(done / total)
    rows = {name: found.rows for name, found in loader.sums.items()}
    return Calibration(pooled(loader.sums), rows, total, len(texts))


def _run_group(model: Transformer, texts: Sequence[Sequence[int]]) -> None:
    longest = max(map(len, texts))
    caches = model.new_caches(len(texts), longest + _CHUNK)
    for start in range(0, longest, _CHUNK):
        live = [(slot, ids) for slot, ids in enumerate(texts) if len(ids) > start]
        pieces = [ids[start : start + _CHUNK] for _, ids in live]
        step = StepInput(
            spans=tuple(
                Span(slot=slot, first=start, count=len(piece))
                for (slot, _), piece in zip(live, pieces, strict=True)
            ),
            ids_T=[i for piece in pieces for i in piece],
            history=tuple(tuple(ids[max(0, start - 8) : start]) for _, ids in live),
            logit_rows=_last_rows(pieces),
        )
        model.forward(step, caches)
        _draft(model, caches, live, start + _CHUNK)


def _last_rows(pieces: Sequence[Sequence[int]]) -> list[int]:
    # every row asks for logits: the head's inputs are those of all positions
    return list(range(sum(map(len, pieces))))


def _draft(
    model: Transformer, caches: Caches, live: Sequence[tuple[int, Sequence[int]]], position: int
) -> None:
    ready = [(slot, ids) for slot, ids in live if len(ids) > position]
    if not model.has_draft or not ready:
        return
    requests = [DraftRequest(slot=s, position=position, token=ids[position]) for s, ids in ready]

    def pick(number: int, j: int, _: Tensor) -> int:
        ids = ready[number][1]
        return ids[min(position + 1 + j, len(ids) - 1)]

    model.draft(requests, caches, pick)


def pooled(sums: dict[str, HessianSum]) -> dict[str, Hessian]:
    """Means; a routed expert's gate input borrows as many rows of its layer as it has inputs.

    Experts that saw few rows would otherwise be fitted to noise, and unseen ones to nothing.
    """
    found = {name: total.mean() for name, total in sums.items()}
    for name, own in list(found.items()):
        match = _EXPERT.match(name) if name.endswith(".w1") else None
        layer = found.get(f"{match[1]}.shared_experts.w1") if match else None
        if layer is None or not layer.rows:
            continue
        extra = own.moment_KK.shape[0]
        weight = own.rows / (own.rows + extra)
        moment = weight * own.moment_KK + (1 - weight) * layer.moment_KK
        found[name] = Hessian(moment, own.rows + extra)
    return found
