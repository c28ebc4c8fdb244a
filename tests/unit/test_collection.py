"""What is spared by garbage collection."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from twinspark.collection import spare_what_is_loaded


class Node:
    """Something that can refer to itself."""

    itself: "Node"


def ring() -> weakref.ref[Node]:
    node = Node()
    node.itself = node
    return weakref.ref(node)


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_there_is_spared_and_what_comes_later_is_not(thawed: None) -> None:
    kept = Node()
    kept.itself = kept
    garbage = ring()
    known = weakref.ref(kept)
    spare_what_is_loaded()
    assert garbage() is None, "garbage of the start is freed first"
    assert gc.get_freeze_count() > 1000 and not any(o is kept for o in gc.get_objects())
    del kept
    gc.collect()
    assert known() is not None, "a full collection does not look at it"
    later = ring()
    gc.collect()
    assert later() is None
