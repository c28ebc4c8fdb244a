"""Linear layers from packs: plain or EXL3, whole or cut into virtual shards (design D17).

A cut matrix is always held as V shard matrices with the shapes a rank of TP = V has; a rank holds
its own ones. Letters: T rows, K inputs, O outputs. Read next: `kernels/matmul.py`,
`kernels/exl3/linear.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.config.model import ModelConfig
from twinspark.distributed.collectives import Collectives, own_shards
from twinspark.errors import ConfigError
from twinspark.kernels.elementwise import compute_dtype
from twinspark.kernels.exl3.choose import AnyExl3, Backend, exl3_product, prepare_product
from twinspark.kernels.exl3.cuda import CudaExl3, exl3_rows
from twinspark.kernels.exl3.grouped import PreparedExperts, prepare_experts
from twinspark.kernels.exl3.linear import Exl3Matrix
from twinspark.kernels.exl3.many import CudaExl3Many, exl3_many, prepare_many, why_not_many
from twinspark.kernels.exl3.shards import exl3_shards
from twinspark.kernels.matmul import RowMatrix, matmul, prepare_matrix
from twinspark.kernels.plain.product import CudaPlain, plain_rows, prepare_plain, why_not_plain
from twinspark.kernels.residual import Site, prepare_site
from twinspark.kernels.rope import inverse_frequencies
from twinspark.pack.weights import PlainMatrix

BLOCK = 128
"""EXL3 matrices can be cut at multiples of this only (model specification 2.3)."""


class Linear:
    """One matrix, ready to multiply; the bits of a row do not depend on the other rows."""

    def __init__(self, matrix: RowMatrix | CudaPlain | AnyExl3) -> None:
        self.matrix = matrix

    def wide(self, x_TK: Tensor) -> Tensor:
        """The product x @ W^T as fp32 [T, O], not rounded (fp64 for fp64 inputs)."""
        if isinstance(self.matrix, RowMatrix):
            return matmul(x_TK, self.matrix)
        if isinstance(self.matrix, CudaPlain):
            return plain_rows(x_TK, self.matrix)
        return exl3_product(x_TK, self.matrix, out_dtype=compute_dtype(x_TK.dtype))

    def __call__(self, x_TK: Tensor) -> Tensor:
        """The product x @ W^T in the dtype of x."""
        if isinstance(self.matrix, CudaExl3):
            return exl3_rows(x_TK, self.matrix)  # rounds as it stores, and so does the next
        if isinstance(self.matrix, CudaPlain):
            return plain_rows(x_TK, self.matrix, out_dtype=x_TK.dtype)
        return self.wide(x_TK).to(x_TK.dtype)


AnyMatrix = Exl3Matrix | PlainMatrix


class EngramRows(Protocol):
    """The table of an Engram layer."""

    def gather(self, row_ids: Tensor) -> Tensor:
        """Rows by id: [..., width] bf16, on the CPU."""

    def gather_bytes(self, row_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """The same as stored, (e4m3 bytes, scale bytes); None where they are stored as bf16."""

    @property
    def row_fields(self) -> tuple[tuple[torch.dtype, int], ...]:
        """Types and widths of what `put` writes: bf16 values, or e4m3 bytes and scale bytes."""

    def put(self, row_ids: npt.NDArray[np.int64], into: Sequence[npt.NDArray[Any]]) -> None:
        """Write rows by id [...] into arrays [..., width] of `row_fields`; bf16 as int16."""


class WeightSource(Protocol):
    """Where a model's tensors come from; `pack.weights.PackWeights` is the one that counts."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and roles."""

    def has(self, name: str) -> bool:
        """Whether there is a plain tensor of this name."""

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor stored as it is."""

    def linear(
        self, prefix: str, rows: slice | None = None, cols: slice | None = None
    ) -> AnyMatrix:
        """A matrix, or the part of it that maps inputs `rows` to outputs `cols`."""

    def engram_rows(self, layer: int) -> EngramRows:
        """The table of an Engram layer, by layer id."""


class ModelLoader:
    """Where modules take their weights from while a model is built.

    Attributes:
        weights: the pack's tensors.
        config: the model's config.
        group: the ranks.
        virtual_shards: V.
        shards: the virtual shards this rank holds.
        dtype: of activations: bfloat16, or float64 for the wide reference.
        device: where weights go.
        kernel_cache: folder of compiled kernels, or None.
        num_bytes: memory of what was loaded so far.
    """

    def __init__(
        self,
        weights: WeightSource,
        *,
        group: Collectives,
        virtual_shards: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        kernel_cache: Path | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Check that the shards fit the ranks; `on_progress` gets fractions 0..1.

        Weights go to the CPU when `device` is None.
        """
        self.weights = weights
        self.config: ModelConfig = weights.config
        self.group = group
        self.virtual_shards = virtual_shards
        self.shards = own_shards(group, virtual_shards)
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.kernel_cache = kernel_cache
        self.num_bytes = 0
        self._on_progress = on_progress
        self._inv_freq: dict[bool, Tensor] = {}

    def inv_freq(self, ratio: int) -> Tensor:
        """Rotary frequencies of a layer: plain for ratio 0, YaRN for compressed ones (3.3).

        All layers of a kind share one tensor, so that a step's angles are computed once.
        """
        compressed = ratio > 0
        if compressed not in self._inv_freq:
            inv_freq = _inverse_frequencies(self.config, compressed)
            self._inv_freq[compressed] = inv_freq.to(self.device)
        return self._inv_freq[compressed]

    def report(self, fraction: float) -> None:
        """Tell how much of the model is loaded."""
        if self._on_progress is not None:
            self._on_progress(fraction)

    @property
    def is_fused(self) -> bool:
        """Whether fused CUDA ops run, which take bf16 activations."""
        return self.device.type == "cuda" and self.dtype == torch.bfloat16

    @property
    def wide(self) -> torch.dtype:
        """Compute dtype: float32, or float64."""
        return compute_dtype(self.dtype)

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor in `dtype` (the compute dtype when None)."""
        tensor = self.weights.plain(name, dtype or self.wide).to(self.device)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def plain_linear(self, name: str) -> Linear:
        """A matrix that every pack stores plain; F16 and BF16 values are exact in fp32."""
        return self.prepare(PlainMatrix(self.weights.plain(name).to(self.device)))

    def has(self, name: str) -> bool:
        """Whether the pack holds this tensor."""
        return self.weights.has(name)

    def linear(
        self, prefix: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> Linear:
        """The matrix `prefix`, or the part that maps inputs `rows` to outputs `cols`."""
        return self.prepare(self.matrix(prefix, rows=rows, cols=cols))

    def prepare(self, matrix: AnyMatrix) -> Linear:
        """Make a matrix ready to multiply."""
        if isinstance(matrix, Exl3Matrix):
            # only the reference body computes in float64
            backend: Backend = "reference" if self.wide == torch.float64 else "auto"
            exl3 = prepare_product(matrix, backend=backend, cache_dir=self.kernel_cache)
            if isinstance(exl3, CudaExl3):
                self.num_bytes += exl3.num_bytes
            else:
                self.num_bytes += tensor_bytes(exl3.weight_KN, exl3.suh_K, exl3.svh_N)
            return Linear(exl3)
        weight_OK = matrix.weight
        kind = (self.device, weight_OK.dtype, weight_OK.shape[1])
        plain: RowMatrix | CudaPlain
        if self.is_fused and why_not_plain(*kind) is None:
            plain = prepare_plain(weight_OK, cache_dir=self.kernel_cache)
        else:
            plain = prepare_matrix(weight_OK, dtype=self.wide)
        self.num_bytes += plain.num_bytes
        return Linear(plain)

    def site(self, prefix: str) -> Site:
        """The mixer of one sublayer: `{prefix}_fn`, `_scale` and `_base` (fp32)."""
        config = self.config
        site = prepare_site(
            self.weights.plain(f"{prefix}_fn", self.wide).to(self.device),
            self.weights.plain(f"{prefix}_scale", self.wide).to(self.device),
            self.weights.plain(f"{prefix}_base", self.wide).to(self.device),
            iters=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            dtype=self.wide,
            cache_dir=self.kernel_cache,
        )
        self.num_bytes += site.num_bytes
        return site

    def matrix(
        self, prefix: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> AnyMatrix:
        """As `linear`, not yet prepared."""
        matrix = self.weights.linear(prefix, rows=rows, cols=cols)
        if isinstance(matrix, Exl3Matrix):
            return matrix.to(self.device)
        return PlainMatrix(matrix.weight.to(self.device))

    def own_columns(self, size: int) -> list[slice]:
        """This rank's part of outputs that are cut into shards.

        One slice a shard; on CUDA all of them in one, which are the same bits in fewer calls.
        """
        parts = [shard_slice(size, self.virtual_shards, shard) for shard in self.shards]
        if self.device.type == "cpu":
            return parts
        return [slice(parts[0].start, parts[-1].stop)]

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
        self._size = len(matrices)
        self._stacked: PreparedExperts | None = None
        self._many: CudaExl3Many | None = None
        self._single: list[Linear] = []
        if len(exl3) == len(matrices) and loader.device.type == "cpu":
            self._stacked = prepare_experts(exl3)
            loader.num_bytes += tensor_bytes(self._stacked.weight_EKN)
            return
        self._single = [loader.prepare(matrix) for matrix in matrices]
        packed = [m.matrix for m in self._single if isinstance(m.matrix, CudaExl3)]
        if 1 < len(packed) == len(matrices) and why_not_many(packed) is None:
            self._many = prepare_many(packed)

    @property
    def alone(self) -> Linear | None:
        """The matrix where it is one, and multiplied by as such."""
        return self._single[0] if len(self._single) == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """Products [S, T, O] in x's dtype of rows [S, T, K], or of rows [T, K] that all share."""
        if self._stacked is not None:
            return exl3_shards(x, self._stacked).to(x.dtype)
        x_STK = x if x.dim() == 3 else x.expand(self._size, *x.shape)
        if self._many is not None:
            num, rows, _ = x_STK.shape
            return exl3_many(x_STK, self._many, x.new_empty(num, rows, self._many.out_features))
        found = self._one_by_one(x_STK)
        return found[0][None] if self._size == 1 else torch.stack(found)

    def side_by_side(self, x: Tensor) -> Tensor:
        """The same products one beside the other, [T, S * O]."""
        if self._stacked is not None:
            return self(x).transpose(0, 1).reshape(x.shape[-2], -1)
        x_STK = x if x.dim() == 3 else x.expand(self._size, *x.shape)
        if self._many is not None:
            num, rows, _ = x_STK.shape
            y_TSO = x.new_empty(rows, num, self._many.out_features)
            exl3_many(x_STK, self._many, y_TSO.transpose(0, 1))
            return y_TSO.view(rows, -1)
        found = self._one_by_one(x_STK)
        return found[0] if self._size == 1 else torch.cat(found, dim=1)

    def _one_by_one(self, x_STK: Tensor) -> list[Tensor]:
        return [linear(part) for linear, part in zip(self._single, x_STK, strict=True)]
