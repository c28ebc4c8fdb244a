"""Tiles of 8 rows: what a call covers is a matter of speed only."""

import pytest
import torch
from tests.kernels.rows import threads

from twinspark.kernels import tiles
from twinspark.kernels.tiles import counts_of, multiply_tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (512, 256), (256, 16), (96, 1024)])
def test_every_tile_has_the_bits_it_has_alone(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    """Up to and beyond the most tiles of a call; rows that are apart; one thread and two."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(8 * 37, inputs + 32, generator=generator, dtype=dtype)[:, 16 : 16 + inputs]
    weight = torch.randn(inputs, outputs, generator=generator, dtype=dtype)
    for number in (1, 2):
        with threads(number):
            alone = torch.cat([torch.mm(tile, weight) for tile in x.split(8)])
            for count in (0, 1, 2, 5, 16, 17, 33, 37):
                out = torch.empty(8 * count, outputs, dtype=dtype)
                assert multiply_tiles(x[: 8 * count], weight, out) is out
                assert torch.equal(out, alone[: 8 * count])
                assert torch.equal(multiply_tiles(x[: 8 * count], weight), out)


@pytest.mark.parametrize("good", [{1}, {1, 3}, {1, 2, 8}, {1, 13}])
def test_a_call_covers_only_what_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, good: set[int]
) -> None:
    """A library whose sums change with some numbers of rows is called with the others only."""
    mm, seen = torch.mm, []

    def picky(x, weight, *, out=None):
        seen.append(len(x) // 8)
        found = mm(x, weight) + (0 if len(x) // 8 in good else 1e-3)
        return found if out is None else out.copy_(found)

    tiles._counts.cache_clear()
    monkeypatch.setattr(torch, "mm", picky)
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(8 * 21, 48, generator=generator), torch.randn(48, 32)
    try:
        assert counts_of(x, weight) == good
        seen.clear()
        found = multiply_tiles(x, weight)
    finally:
        tiles._counts.cache_clear()
    assert set(seen) <= good and sum(seen) == 21
    assert torch.equal(found, torch.cat([mm(tile, weight) for tile in x.split(8)]))
