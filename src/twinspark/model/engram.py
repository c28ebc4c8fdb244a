"""Engram: n-gram hashes into large tables, injected into the residual streams.

Owns the hash of a step's rows and the injection of one layer (model specification 3.9).
Letters: T tokens, C streams, D hidden. Read next: `kernels/engram.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.cache.upload import upload
from twinspark.config.model import ModelConfig
from twinspark.errors import ConfigError
from twinspark.kernels.engram import EngramHash
from twinspark.kernels.engram_gate.gate import dequant_rows, gate_rows
from twinspark.model.linear import ModelLoader
from twinspark.model.step import StepInput

Ints = npt.NDArray[np.int64]


class SlotRows(Protocol):
    """Consecutive rows of one slot."""

    @property
    def first(self) -> int:
        """Position of the first row."""

    @property
    def ids(self) -> Sequence[int]:
        """Tokens of the rows."""

    @property
    def history(self) -> Sequence[int]:
        """The tokens just before `first`, oldest first; as many as the hash looks back are read."""


class TokenRun(NamedTuple):
    """`SlotRows` of a step."""

    first: int
    ids: Sequence[int]
    history: Sequence[int]


class StepHash:
    """Table rows of every row of a step, for all Engram layers at once."""

    def __init__(self, config: ModelConfig, token_map: np.ndarray) -> None:
        """Check the token map and find primes and multipliers.

        Args:
            config: the model.
            token_map: int [vocab], raw id to compressed id.

        Raises:
            ConfigError: the map's size is not engram_compressed_vocab_size, or it does not cover
                the vocabulary, or the tables have other sizes than the primes give.
        """
        found = len(np.unique(token_map))
        if found != config.engram_compressed_vocab_size:
            raise ConfigError(
                f"the tokenizer gives {found} compressed ids, the config says "
                f"engram_compressed_vocab_size {config.engram_compressed_vocab_size}: this "
                "tokenizer does not belong to this model"
            )
        self._config = config
        self._map = np.asarray(token_map, np.int64)  # what it is multiplied with has this type
        self._hash = EngramHash(
            config.engram_layer_ids,
            config.engram_num_embeddings,
            max_ngram=config.engram_max_ngram_size,
            num_heads=config.engram_n_heads,
            vocab_size=config.engram_vocab_size,
            compressed_vocab_size=config.engram_compressed_vocab_size,
            pad_id=int(token_map[config.engram_pad_token_id]),
        )
        self._nothing = [-1] * (config.engram_max_ngram_size - 1)
        self._counts: list[int] = []  # of the runs that came last, and where their rows stand
        self._place_TS: Ints = np.zeros((0, 0), np.int64)

    def rows(self, step: StepInput) -> Tensor:
        """Row ids of a step, int64 [T, Engram layers, columns]."""
        runs, first = [], 0
        for span, history in zip(step.spans, step.history, strict=True):
            ids = step.ids_T[first : first + span.count]
            runs.append(TokenRun(first=span.first, ids=ids, history=history))
            first += span.count
        return torch.from_numpy(self.of_runs(runs))

    def of_runs(self, runs: Iterable[SlotRows]) -> Ints:
        """The same of tokens as the engine holds them, int64 [T, Engram layers, columns]."""
        reach, image_id = len(self._nothing), self._config.image_token_id
        flat: list[int] = []
        counts: list[int] = []
        places: list[int] = []
        is_whole = True
        for run in runs:
            before = run.history[-reach:][-run.first :] if run.first else ()
            if len(before) < reach:
                flat += self._nothing[len(before) :]
                is_whole = False
            flat += before
            places += range(len(flat), len(flat) + len(run.ids))
            flat += run.ids
            counts.append(len(run.ids))
        ids = np.array(flat, np.int64)
        blocked = None
        if not is_whole or image_id in flat:
            blocked = (ids == image_id) | (ids < 0)  # ids below 0 are where there is no token
        if counts != self._counts:
            self._counts, self._place_TS = counts, self._hash.places(np.array(places, np.int64))
        return self._hash.rows(self._map, ids, blocked, self._place_TS)


class Engram:
    """The table, projection and gate of one Engram layer.

    Attributes:
        index: of the layer among Engram layers.
        fields: types and shapes of what `put` writes for one row.
    """

    def __init__(self, loader: ModelLoader, layer: int) -> None:
        """Load backbone layer `layer`'s Engram."""
        config, prefix = loader.config, f"layers.{layer}.engram"
        self.index = config.engram_layer_ids.index(layer)
        self._config = config
        self._table = loader.weights.engram_rows(layer)
        columns = config.engram_columns
        self.fields = [(dtype, (columns, width)) for dtype, width in self._table.row_fields]
        self._cache_dir = loader.kernel_cache
        self._wkv = loader.linear(f"{prefix}.wkv")
        # only the product of the two is ever used (model specification 3.9)
        self._qk_CD = loader.plain(f"{prefix}.q_weight") * loader.plain(f"{prefix}.k_weight")

    def gather(self, hash_TLC: Tensor) -> Tensor:
        """Table rows side by side, bf16 [T, columns * width], on the host.

        Args:
            hash_TLC: their numbers, [T, Engram layers, columns].
        """
        return self._table.gather(hash_TLC[:, self.index]).flatten(1)

    def rows(self, hash_TLC: Tensor, device: torch.device) -> Tensor:
        """The same on a device; a CUDA device dequantizes them itself."""
        found = None
        if device.type == "cuda":
            found = self._table.gather_bytes(hash_TLC[:, self.index])
        if found is None:
            return upload([self.gather(hash_TLC)], device)[0]
        values, scales = upload(found, device)
        rows = dequant_rows(values.flatten(0, 1), scales.flatten(0, 1), cache_dir=self._cache_dir)
        return rows.view(len(hash_TLC), -1)

    def put(self, hash_TLC: Ints, into: Sequence[npt.NDArray[Any]]) -> None:
        """Write table rows where a device is sent them from; arrays of `fields`, T rows first."""
        self._table.put(hash_TLC[:, self.index], into)

    def rows_of(self, sent: Sequence[Tensor]) -> Tensor:
        """Rows [T, columns * width], bf16, from tensors of `fields` on the device."""
        if len(sent) == 1:
            return sent[0].flatten(1)
        values, scales = (tensor.flatten(0, 1) for tensor in sent)
        rows = dequant_rows(values, scales, cache_dir=self._cache_dir)
        return rows.view(len(sent[0]), -1)

    def __call__(self, x_TCD: Tensor, table_TK: Tensor, image_T: Tensor | None = None) -> Tensor:
        """Inject into the streams.

        Args:
            x_TCD: streams.
            table_TK: the rows' table rows side by side.
            image_T: rows of image spans, whose gate is 0.
        """
        kv_TE = self._wkv(table_TK.to(x_TCD.dtype))
        return gate_rows(
            x_TCD, kv_TE, self._qk_CD, image_T,
            eps=self._config.rms_norm_eps, cache_dir=self._cache_dir,
        )  # fmt: skip
