"""The measurement of masks measures what it says."""

from twinspark.bench.masks import DOCUMENTS, measure_masks


def test_masks_are_measured_along_whole_documents(small_tokenizer):
    figures = measure_masks(small_tokenizer, 364, rounds=1)
    assert figures.num_masks > 20 * len(DOCUMENTS)
    assert 0 < figures.library <= figures.library_p99
    assert 0 < figures.ours <= figures.ours_p99
    assert 0 < figures.advance < figures.ours_p99
