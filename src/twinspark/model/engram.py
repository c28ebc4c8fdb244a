"""Engram: n-gram hashes into large tables, injected into the residual streams.

Owns the hash of a step's rows and the injection of one layer (model specification 3.9).
Letters: T tokens, C streams, D hidden. Read next: `kernels/engram.py`.
"""

import numpy as np
import torch
from torch import Tensor

from twinspark.cache.upload import upload
from twinspark.config.model import ModelConfig
from twinspark.errors import ConfigError
from twinspark.kernels.engram import EngramHash
from twinspark.kernels.engram_gate.gate import dequant_rows, gate_rows
from twinspark.model.linear import ModelLoader
from twinspark.model.step import StepInput


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
        self._map = token_map
        self._hash = EngramHash(
            config.engram_layer_ids,
            config.engram_num_embeddings,
            max_ngram=config.engram_max_ngram_size,
            num_heads=config.engram_n_heads,
            vocab_size=config.engram_vocab_size,
            compressed_vocab_size=config.engram_compressed_vocab_size,
            pad_id=int(token_map[config.engram_pad_token_id]),
        )

    def rows(self, step: StepInput) -> Tensor:
        """Row ids of a step, int64 [T, Engram layers, columns]."""
        reach = self._config.engram_max_ngram_size - 1
        columns = self._config.engram_n_heads * reach
        parts = [np.zeros((0, len(self._config.engram_layer_ids), columns), np.int64)]
        first = 0
        for span, history in zip(step.spans, step.history, strict=True):
            ids = np.asarray(step.ids_T[first : first + span.count], np.int64)
            before = np.asarray(history[-reach:], np.int64)[-min(reach, span.first) :]
            if span.first == 0:
                before = before[:0]
            parts.append(self._span_rows(before, ids, reach))
            first += span.count
        return torch.from_numpy(np.concatenate(parts))

    def _span_rows(self, before: np.ndarray, ids: np.ndarray, reach: int) -> np.ndarray:
        missing = reach - len(before)
        padded = np.concatenate([np.zeros(missing, np.int64), before, ids])
        blocked = padded == self._config.image_token_id
        blocked[:missing] = True
        return self._hash.rows(self._map, padded, blocked)


class Engram:
    """The table, projection and gate of one Engram layer."""

    def __init__(self, loader: ModelLoader, layer: int) -> None:
        """Load backbone layer `layer`'s Engram."""
        config, prefix = loader.config, f"layers.{layer}.engram"
        self.index = config.engram_layer_ids.index(layer)
        self._config = config
        self._table = loader.weights.engram_rows(layer)
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
