"""The measurement of masks measures what it says."""

from itertools import accumulate, cycle

import pytest

from twinspark.bench import masks
from twinspark.bench.masks import DOCUMENTS, measure_masks


def test_masks_are_measured_along_whole_documents(small_tokenizer, monkeypatch):
    """On a clock by which a token takes 1 us, the library's mask 2, and both of ours 4."""
    ticks = accumulate(cycle((0, 1, 2, 4)))
    monkeypatch.setattr(masks, "perf_counter", lambda: 1e-6 * next(ticks))
    figures = measure_masks(small_tokenizer, 364, rounds=1)
    assert figures.num_masks > 20 * len(DOCUMENTS)
    assert (figures.library, figures.library_p99) == pytest.approx((2, 2))
    assert (figures.ours, figures.ours_p99) == pytest.approx((3, 3))
    assert (figures.ratio, figures.advance) == pytest.approx((1.5, 1))
