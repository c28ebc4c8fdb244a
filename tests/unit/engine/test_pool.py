"""Slots and pages by hand; any order of calls is in `tests/property/test_pool.py`."""

import pytest

from twinspark.engine.pool import PagePool, SlotPool


def test_the_lowest_slot_comes_first_and_none_comes_twice() -> None:
    pool = SlotPool(3)
    assert [pool.take(), pool.take(), pool.take(), pool.take()] == [0, 1, 2, None]
    pool.release(1)
    assert (pool.num_free, pool.num_taken, pool.take()) == (1, 2, 1)
    pool.check_integrity()


@pytest.mark.parametrize(("from_top", "expected"), [(False, [0, 1, 2]), (True, [7, 6, 5])])
def test_pages_come_from_the_asked_end(from_top: bool, expected: list[int]) -> None:
    pool = PagePool(8, 16, from_top=from_top)
    assert pool.take(3) == expected
    pool.release(expected[1:2])
    assert pool.take(1) == expected[1:2], "the page nearest to that end is given again"
    assert pool.num_free == 5


def test_taking_is_all_or_nothing() -> None:
    pool = PagePool(4, 16)
    held = pool.take(3)
    assert pool.take(2) is None
    assert pool.num_free == 1
    assert pool.take(0) == []
    assert pool.take(1) == [3]
    pool.check_integrity([held or [], [3]])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (1 << 20, 65536)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert PagePool(1, 16).pages_for(tokens) == pages


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(2, 16)
    pages = pool.take(1)
    assert pages == [0]
    pool.share(pages)
    pool.share(pages)
    assert pool.references(0) == 3
    pool.release([0, 0])
    assert pool.num_free == 1
    pool.release([0])
    assert pool.num_free == 2
    pool.check_integrity([])


def test_free_pages_can_be_neither_shared_nor_released() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(AssertionError, match="page 1 is free and cannot be shared"):
        pool.share([1])
    with pytest.raises(AssertionError, match="page 1 is free already"):
        pool.release([1])


def test_integrity_names_the_page_whose_references_do_not_fit() -> None:
    pool = PagePool(4, 16)
    pool.take(2)
    pool.share([1])
    pool.check_integrity([[0, 1], [1]])
    with pytest.raises(AssertionError, match="page 1 has 2 references, its holders have 1"):
        pool.check_integrity([[0, 1]])
    with pytest.raises(AssertionError, match="page 3 has 0 references, its holders have 1"):
        pool.check_integrity([[0, 1], [1, 3]])
    with pytest.raises(AssertionError, match="a page that is none"):
        pool.check_integrity([[0, 1], [1, 4]])
