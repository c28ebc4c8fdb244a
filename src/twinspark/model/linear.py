"""Linear layers from packs: plain or EXL3, whole or cut into virtual shards (design D17).

A cut matrix is always held as V shard matrices with the shapes a rank of TP = V has; a rank holds
its own ones. Letters: T rows, K inputs, O outputs. Read next: `kernels/matmul.py`,
`kernels/exl3/linear.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twinspark.config.model import ModelConfig
from twinspark.distributed.collectives import Collectives, own_shards
from twinspark.errors import ConfigError
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.exl3.grouped import PreparedExperts, prepare_experts
from twinspark.kernels.exl3.linear import Exl3Matrix, PreparedExl3, exl3_linear, prepare_exl3
from twinspark.kernels.exl3.shards import exl3_shards
from twinspark.kernels.matmul import RowMatrix, matmul, prepare_matrix
from twinspark.kernels.rope import inverse_frequencies
from twinspark.pack.weights import PackWeights, PlainMatrix

BLOCK = 128
"""EXL3 matrices can be cut at multiples of this only (model specification 2.3)."""


class Linear:
    """One matrix, ready to multiply; the bits of a row do not depend on the other rows."""

    def __init__(self, matrix: RowMatrix | PreparedExl3) -> None:
        self.matrix = matrix

    def wide(self, x_TK: Tensor) -> Tensor:
        """The product x @ W^T as fp32 [T, O], not rounded (fp64 for fp64 inputs)."""
        if isinstance(self.matrix, RowMatrix):
            return matmul(x_TK, self.matrix)
        return exl3_linear(x_TK, self.matrix, out_dtype=compute_dtype(x_TK.dtype))

    def __call__(self, x_TK: Tensor) -> Tensor:
        """The product x @ W^T in the dtype of x."""
        return self.wide(x_TK).to(x_TK.dtype)


AnyMatrix = Exl3Matrix | PlainMatrix


class ModelLoader:
    """Where modules take their weights from while a model is built.

    Attributes:
        weights: the pack's tensors.
        config: the model's config.
        group: the ranks.
        virtual_shards: V.
        shards: the virtual shards this rank holds.
        dtype: of activations: bfloat16, or float64 for the wide reference.
        num_bytes: memory of what was loaded so far.
    """

    def __init__(
        self,
        weights: PackWeights,
        *,
        group: Collectives,
        virtual_shards: int,
        dtype: torch.dtype,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Check that the shards fit the ranks; `on_progress` gets fractions 0..1."""
        self.weights = weights
        self.config: ModelConfig = weights.pack.config
        self.group = group
        self.virtual_shards = virtual_shards
        self.shards = own_shards(group, virtual_shards)
        self.dtype = dtype
        self.num_bytes = 0
        self._on_progress = on_progress
        self._inv_freq: dict[bool, Tensor] = {}

    def inv_freq(self, ratio: int) -> Tensor:
        """Rotary frequencies of a layer: plain for ratio 0, YaRN for compressed ones (3.3).

        All layers of a kind share one tensor, so that a step's angles are computed once.
        """
        compressed = ratio > 0
        if compressed not in self._inv_freq:
            self._inv_freq[compressed] = _inverse_frequencies(self.config, compressed)
        return self._inv_freq[compressed]

    def report(self, fraction: float) -> None:
        """Tell how much of the model is loaded."""
        if self._on_progress is not None:
            self._on_progress(fraction)

    @property
    def wide(self) -> torch.dtype:
        """Compute dtype: float32, or float64."""
        return compute_dtype(self.dtype)

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor in `dtype` (the compute dtype when None)."""
        tensor = self.weights.plain(name, dtype or self.wide)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def plain_linear(self, name: str) -> Linear:
        """A matrix that every pack stores plain; F16 and BF16 values are exact in fp32."""
        return self.prepare(PlainMatrix(self.weights.plain(name)))

    def has(self, name: str) -> bool:
        """Whether the pack holds this tensor."""
        return name in self.weights.pack.names

    def linear(
        self, prefix: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> Linear:
        """The matrix `prefix`, or the part that maps inputs `rows` to outputs `cols`."""
        return self.prepare(self.matrix(prefix, rows=rows, cols=cols))

    def prepare(self, matrix: AnyMatrix) -> Linear:
        """Make a matrix ready to multiply."""
        if isinstance(matrix, Exl3Matrix):
            exl3 = prepare_exl3(matrix)
            self.num_bytes += tensor_bytes(exl3.weight_KN, exl3.suh_K, exl3.svh_N)
            return Linear(exl3)
        plain = prepare_matrix(matrix.weight, dtype=self.wide)
        self.num_bytes += plain.num_bytes
        return Linear(plain)

    def matrix(
        self, prefix: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> AnyMatrix:
        """As `linear`, not yet prepared."""
        return self.weights.linear(prefix, rows=rows, cols=cols)

    def columns(self, prefix: str, size: int) -> "ColumnShards":
        """A column-split matrix of `size` outputs, of which this rank holds its shards."""
        parts = [shard_slice(size, self.virtual_shards, s) for s in range(self.virtual_shards)]
        own = [self.linear(prefix, cols=parts[shard]) for shard in self.shards]
        return ColumnShards(own, [part.stop - part.start for part in parts], self.group)


class ColumnShards:
    """A matrix whose outputs are spread over virtual shards, some wider than others."""

    def __init__(self, own: Sequence[Linear], widths: Sequence[int], group: Collectives) -> None:
        """Take this rank's shards, and how many outputs each shard of all ranks has."""
        self._own = own
        self._group = group
        self._widths = None if len(set(widths)) == 1 else list(widths)

    def wide(self, x_TK: Tensor) -> Tensor:
        """All outputs [T, O] of rows, fp32 (fp64 for fp64 inputs), the same on every rank."""
        parts = [shard.wide(x_TK) for shard in self._own]
        return torch.cat(self._group.gather_shards(parts, widths=self._widths), dim=1)


def _inverse_frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    scaling = config.rope_scaling
    if not compressed:
        return inverse_frequencies(config.qk_rope_head_dim, config.rope_theta)
    if scaling is None:
        return inverse_frequencies(config.qk_rope_head_dim, config.compress_rope_theta)
    return inverse_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=scaling.factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        original_max_positions=scaling.original_max_position_embeddings,
    )


def tensor_bytes(*tensors: Tensor) -> int:
    """Memory of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shard_slice(size: int, shards: int, shard: int) -> slice:
    """The part of `size` channels that belongs to a virtual shard.

    Cuts fall on multiples of 128 where the size is one (earlier shards take the larger parts);
    other sizes, which only plain matrices have, must divide evenly.

    Raises:
        ConfigError: the size cannot be cut so.
    """
    if size % (BLOCK * shards) and (size % BLOCK or size < BLOCK * shards):
        if size % shards:
            raise ConfigError(f"{size} channels cannot be cut into {shards} virtual shards")
        return slice(size // shards * shard, size // shards * (shard + 1))
    blocks, extra = divmod(size // BLOCK, shards)
    first = shard * blocks + min(shard, extra)
    count = blocks + (1 if shard < extra else 0)
    return slice(first * BLOCK, (first + count) * BLOCK)


class ShardBank:
    """Matrices of one shape, each applied to rows of its own: the shards of a cut matrix.

    EXL3 matrices share one kernel call; others are multiplied one by one. Both give a row the bits
    it gets alone.
    """

    def __init__(self, loader: ModelLoader, matrices: Sequence[AnyMatrix]) -> None:
        """Prepare the matrices."""
        exl3 = [m for m in matrices if isinstance(m, Exl3Matrix) and m.bias is None]
        self._stacked: PreparedExperts | None = None
        self._single: list[Linear] = []
        if len(exl3) == len(matrices):
            self._stacked = prepare_experts(exl3)
            loader.num_bytes += tensor_bytes(self._stacked.weight_EKN)
        else:
            self._single = [loader.prepare(matrix) for matrix in matrices]

    def __call__(self, x: Tensor) -> Tensor:
        """Unrounded products [S, T, O] of rows [S, T, K], or of the same rows [T, K] for all."""
        if self._stacked is not None:
            return exl3_shards(x, self._stacked)
        parts = x.unbind(0) if x.dim() == 3 else [x] * len(self._single)
        return torch.stack(
            [linear.wide(part) for linear, part in zip(self._single, parts, strict=True)]
        )
