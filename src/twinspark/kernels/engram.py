"""Engram: n-gram hashes into large embedding tables, and the gate that lets rows in.

Owns primes, multipliers, row ids and the gate (model specification 3.9); the tables and their
projection are the model's. Read next: `token_map.py`, which compresses token ids before hashing.
Letters: T tokens, C residual streams, D hidden, L Engram layers, S look-back, H hash heads.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinspark.errors import ConfigError
from twinspark.kernels.elementwise import compute_dtype, sigmoid
from twinspark.kernels.rms_norm import inverse_rms
from twinspark.kernels.sums import row_sum

Ints = npt.NDArray[np.int64]

# REF draws these with numpy.random.default_rng(10007 * layer_id); as constants they do not depend
# on numpy keeping its streams. Key: (layer_id, compressed_vocab_size).
_SHIPPED: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (1, 99092): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (14, 99092): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


def find_primes(num_layers: int, per_layer: int, heads: int, above: int) -> list[list[int]]:
    """Table sizes of every hash column: distinct primes, ascending within an n-gram order.

    Args:
        num_layers: Engram layers.
        per_layer: n-gram orders of a layer (max n-gram size - 1).
        heads: hash heads of an order.
        above: engram_vocab_size; the search starts there for every order.

    Returns:
        per layer the primes of its columns, order by order.
    """
    seen: set[int] = set()
    layers = []
    for _ in range(num_layers):
        columns: list[int] = []
        for _ in range(per_layer):
            current = above - 1
            for _ in range(heads):
                current = _next_prime(current, seen)
                seen.add(current)
                columns.append(current)
        layers.append(columns)
    return layers


def _next_prime(after: int, seen: set[int]) -> int:
    number = after + 1
    while number in seen or not _is_prime(number):
        number += 1
    return number


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, int(number**0.5) + 2, 2))


def multipliers(layer_id: int, compressed_vocab_size: int, reach: int) -> list[int]:
    """Odd hash multipliers of a layer, one a look-back step (0 .. reach - 1)."""
    shipped = _SHIPPED.get((layer_id, compressed_vocab_size))
    if shipped is not None and reach == len(shipped):
        return list(shipped)
    bound = (2**63 - 1) // compressed_vocab_size // 2
    generator = np.random.default_rng(10007 * layer_id)
    drawn = generator.integers(0, bound, size=reach, dtype=np.int64)
    return [2 * int(value) + 1 for value in drawn]


class EngramHash:
    """Row ids of all Engram layers' hash columns.

    Columns are ordered (n-gram order, head); a row id includes its column's offset.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
        num_embeddings: Sequence[int],
        *,
        max_ngram: int,
        num_heads: int,
        vocab_size: int,
        compressed_vocab_size: int,
        pad_id: int,
    ) -> None:
        """Find primes and multipliers.

        Args:
            layer_ids: backbone layers with an Engram, in order.
            num_embeddings: rows of each layer's table.
            max_ngram: longest n-gram.
            num_heads: hash heads of each n-gram order.
            vocab_size: engram_vocab_size, where the search for primes starts.
            compressed_vocab_size: number of distinct compressed ids.
            pad_id: the *compressed* id of engram_pad_token_id.

        Raises:
            ConfigError: the primes of a layer do not add up to its num_embeddings.
        """
        primes = find_primes(len(layer_ids), max_ngram - 1, num_heads, vocab_size)
        for layer, columns, expected in zip(layer_ids, primes, num_embeddings, strict=True):
            if sum(columns) != expected:
                raise ConfigError(
                    f"engram_num_embeddings of layer {layer} is {expected}, but the primes of its "
                    f"{len(columns)} columns add up to {sum(columns)}: vocabulary, n-gram size or "
                    "head count do not belong to this table"
                )
        self._reach = max_ngram
        self._pad_id = pad_id
        primes_LC = np.array(primes, np.int64)
        ends_LC = np.cumsum(primes_LC, axis=1)
        self._shape_LC = primes_LC.shape
        shape = (len(layer_ids), max_ngram - 1, num_heads)
        self._primes_LSH = primes_LC.reshape(shape)
        self._offsets_LSH = (ends_LC - primes_LC).reshape(shape)
        factors = [multipliers(i, compressed_vocab_size, max_ngram) for i in layer_ids]
        self._factors_LS = np.array(factors, np.int64)
        self._back_S = np.arange(max_ngram)

    def places(self, place_T: Ints) -> Ints:
        """Places of tokens and of what is before each of them, int64 [T, max_ngram]."""
        places: Ints = place_T[:, None] - self._back_S
        return places

    def rows(
        self,
        token_map: npt.NDArray[np.integer],
        ids: Ints,
        blocked: npt.NDArray[np.bool_] | None,
        place_TS: Ints | None = None,
    ) -> Ints:
        """Row ids of tokens.

        Args:
            token_map: int [vocab], raw id to compressed id.
            ids: raw ids, in front of every token its look-back of max_ngram - 1.
            blocked: same length; True where there is no token or an image stands. What lies before
                a blocked place is hidden too. None is nowhere.
            place_TS: where tokens and what is before them stand in `ids`, of `places`; None is of
                all that have a whole look-back, one run of tokens.

        Returns:
            int64 [T, L, columns].
        """
        if place_TS is None:
            place_TS = self.places(np.arange(self._reach - 1, len(ids)))
        # back_TS[t, s] is the token s places before token t; blocking is sticky along s
        back_TS = token_map.take(ids.take(place_TS))
        if blocked is not None:
            back_TS[np.logical_or.accumulate(blocked[place_TS], axis=1)] = self._pad_id
        roll_TLS = np.bitwise_xor.accumulate(back_TS[:, None] * self._factors_LS, axis=2)
        rows_TLSH: Ints = roll_TLS[:, :, 1:, None] % self._primes_LSH
        rows_TLSH += self._offsets_LSH
        return rows_TLSH.reshape(len(place_TS), *self._shape_LC)


def engram_gate(
    x_TCD: Tensor,
    key_TCD: Tensor,
    value_TD: Tensor,
    qk_weight_CD: Tensor,
    blocked_T: Tensor | None = None,
    *,
    eps: float,
) -> Tensor:
    """Add the gated value to every stream.

    Args:
        x_TCD: [T, C, D] streams, bf16 or fp64.
        key_TCD: [T, C, D].
        value_TD: [T, D].
        qk_weight_CD: [C, D], product of the two norm weights, fp32 or wider.
        blocked_T: [T] bool, rows that take nothing in (image positions); None is no row.
        eps: rms_norm_eps.

    Returns:
        [T, C, D] in x's dtype, rounded once.
    """
    wide = compute_dtype(x_TCD.dtype)
    x, key = x_TCD.to(wide), key_TCD.to(wide)
    dot_TC1 = row_sum(x * qk_weight_CD.to(wide) * key)
    dot_TC1 = dot_TC1 * inverse_rms(x, eps) * inverse_rms(key, eps) * x.shape[-1] ** -0.5
    root_TC1 = torch.copysign(dot_TC1.abs().clamp_(min=1e-6).sqrt_(), dot_TC1)
    gate_TC1 = sigmoid(root_TC1)
    if blocked_T is not None:
        gate_TC1 = gate_TC1.masked_fill(blocked_T[:, None, None], 0.0)
    return (gate_TC1 * value_TD.to(wide)[:, None]).add_(x).to(x_TCD.dtype)
