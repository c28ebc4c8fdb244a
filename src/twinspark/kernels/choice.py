"""From logits to a token: truncation and the keyed choice (design D20, D21).

The noise of a token is a pure function of (seed, position, token id), so a reply does not depend on
drafting, batching or the order of calls. Masks and penalties come before this and are the engine's;
what log-probabilities need of a row is here. Host arithmetic in numpy. Letters: V vocabulary.
Read next: engine/sampler.py.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Float64s = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

# G lies between -log(-log1p(-w)) at w = 1 - 2^-33 and at w = 2^-33: -3.2 and 22.9. A logit further
# below the largest than their distance can never win, so its noise is not computed.
_NOISE_SPAN = 26.2

_BLOCK = 8192  # tokens a pass of the generator: its dozen arrays then stay in the cache
_RUN = 128
_WEIGHT_SCALE = 2.0**35  # 2^17 tokens of weight 1 still add up to less than 2^53
_WEIGHT_SPAN = 24.3  # above 35 log 2
_NUM_BUCKETS = 4096
_BUCKETS_PER_UNIT = 128.0


def philox4x32(counters: npt.ArrayLike, key: tuple[int, int]) -> Words:
    """Philox4x32-10 (Salmon et al. 2011).

    Args:
        counters: [..., 4] words below 2^32.
        key: two words below 2^32.

    Returns:
        uint64 [..., 4], each below 2^32.
    """
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counters, np.uint64), -1, 0)
    return np.stack(_philox(c0, c1, c2, c3, key), axis=-1)


def _philox(
    c0: Words, c1: Words, c2: Words, c3: Words, key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product_1 >> _SHIFT) ^ c1 ^ np.uint64(key_0)
        c2 = (product_0 >> _SHIFT) ^ c3 ^ np.uint64(key_1)
        c1, c3 = product_1 & _LOW, product_0 & _LOW
        key_0, key_1 = (key_0 + _WEYL_0) & 0xFFFFFFFF, (key_1 + _WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def noise_words(seed: int, position: int, token_ids: Ints, choice: int = 0) -> Words:
    """The integer r of every token (design D20): equal on every machine.

    Args:
        seed: any integer, taken mod 2^64.
        position: absolute position the chosen token will take.
        token_ids: int64 [n].
        choice: index of the reply when a request asks for several.
    """
    seed %= 1 << 64
    key = (seed & 0xFFFFFFFF, seed >> 32)
    c1, c2, c3 = (np.full(1, word, np.uint64) for word in (position, choice, 0))
    words = token_ids.astype(np.uint64)
    for first in range(0, len(words), _BLOCK):
        block = words[first : first + _BLOCK]
        block[:] = _philox(block, c1, c2, c3, key)[0]
    return words


def gumbel(seed: int, position: int, token_ids: Ints, choice: int = 0) -> Float64s:
    """Standard Gumbel noise of tokens, float64 [n] (arguments as in `noise_words`)."""
    uniform = (noise_words(seed, position, token_ids, choice).astype(np.float64) + 0.5) * 2.0**-32
    noise: Float64s = -np.log(-np.log1p(-uniform))
    return noise


def greedy_choice(logits_V: Floats) -> int:
    """The largest logit; equal ones go to the lowest id."""
    return int(np.argmax(logits_V))


def largest_ids(values_V: Floats, num: int) -> Ints:
    """Ids of the `num` largest values (all, if there are fewer), best first, equal by lower id."""
    ids: Ints = np.flatnonzero(values_V >= _low_bound(values_V, num))
    return ids[np.argsort(-values_V[ids], kind="stable")][: max(num, 0)]


def _low_bound(values_V: Floats, num: int) -> np.floating[Any]:
    """A value that at least `num` values reach: the num-th largest of the maxima of short runs."""
    maxima = np.maximum.reduceat(values_V, np.arange(0, len(values_V), _RUN))
    place = len(maxima) - max(num, 1)
    bound: np.floating[Any] = np.partition(maxima, place)[place] if place >= 0 else values_V.min()
    return bound


def log_sum_exp(logits_V: Floats) -> float:
    """Log of the sum of exp(logit), in float64; its bits do not depend on the order of the sum.

    Terms are cut into two whole numbers of 35 bits, which float64 adds exactly for up to 2^17
    tokens; what is cut off is 2^-70 of the largest term. A largest logit that is not finite is
    returned as it is.
    """
    peak = logits_V.max()
    if not np.isfinite(peak):
        return float(peak)
    high = low = 0.0
    for first in range(0, len(logits_V), _BLOCK):
        terms = logits_V[first : first + _BLOCK].astype(np.float64)
        np.exp(np.subtract(terms, peak, out=terms), out=terms)
        terms *= _WEIGHT_SCALE
        whole = np.floor(terms)
        terms -= whole
        terms *= _WEIGHT_SCALE
        high += float(whole.sum())
        low += float(np.floor(terms, out=terms).sum())
    return float(peak) + float(np.log((high + low / _WEIGHT_SCALE) / _WEIGHT_SCALE))


def filter_logits(
    scaled_V: Float64s, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Ints:
    """Ids that stay after top-k, then top-p among those, then min-p, ascending.

    All three follow the order (logit descending, id ascending). Top-p keeps the shortest start
    of that order whose probability, relative to what top-k left, reaches `top_p`. Min-p drops ids
    under that share of the largest probability. At least one id always stays.

    Args:
        scaled_V: float64 [V], logits over temperature; -inf is a masked token.
        top_k: 0 is off.
        top_p: 1.0 is off.
        min_p: 0.0 is off.
    """
    peak = scaled_V.max()
    ids: Ints
    if 0 < top_k < len(scaled_V):
        ids = np.sort(largest_ids(scaled_V, top_k))
        ids = ids[scaled_V[ids] > -np.inf]
    else:
        # below that depth a token weighs nothing in top-p and is never reached
        deepest = peak - _WEIGHT_SPAN if top_p < 1.0 else np.finfo(np.float64).min
        ids = np.flatnonzero(scaled_V >= deepest)
    if top_p < 1.0:
        ids = _nucleus(scaled_V, ids, peak, top_p)
    if min_p > 0.0:
        ids = ids[scaled_V[ids] - peak >= np.log(min_p)]
    return ids


def _nucleus(scaled_V: Float64s, ids: Ints, peak: np.float64, top_p: float) -> Ints:
    values = scaled_V[ids]
    # whole numbers whose sum stays below 2^53: float64 adds them exactly, in any order
    weights = np.floor(np.exp(values - peak) * _WEIGHT_SCALE)
    wanted = top_p * weights.sum()
    # instead of sorting everything: count mass by depth below the peak, sort the bucket it ends in
    depth = np.minimum((peak - values) * _BUCKETS_PER_UNIT, _NUM_BUCKETS - 1.0).astype(np.int64)
    mass = np.cumsum(np.bincount(depth, weights, _NUM_BUCKETS))
    last = int(np.searchsorted(mass, wanted))
    inside = np.flatnonzero(depth == last)
    inside = inside[np.argsort(-values[inside], kind="stable")]
    before = mass[last - 1] if last else 0.0
    kept = int(np.searchsorted(before + np.cumsum(weights[inside]), wanted)) + 1
    keep = depth < last
    keep[inside[:kept]] = True
    return ids[keep]


def keyed_choice(
    logits_V: Floats,
    position: int,
    *,
    seed: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    choice: int = 0,
) -> int:
    """The token at a position: the largest logit / T + G among what the filters leave.

    Args:
        logits_V: fp32 or fp64 [V], masks and penalties applied; -inf is a masked token.
        position: absolute position the chosen token will take.
        seed: any integer, taken mod 2^64.
        temperature: 0 is greedy, and then nothing else is read.
        top_k: see `filter_logits`.
        top_p: see `filter_logits`.
        min_p: see `filter_logits`.
        choice: index of the reply when a request asks for several.

    Returns:
        a token id; ties go to the lower one.
    """
    if temperature <= 0.0:
        return greedy_choice(logits_V)
    scaled_V = logits_V.astype(np.float64) / temperature
    ids = filter_logits(scaled_V, top_k=top_k, top_p=top_p, min_p=min_p)
    values = scaled_V[ids]
    near = values >= values.max() - _NOISE_SPAN
    ids, values = ids[near], values[near]
    return int(ids[np.argmax(values + gumbel(seed, position, ids, choice))])
