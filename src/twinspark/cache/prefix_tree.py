"""The tree under the prefix index: whole pages keyed by their token ids, and what hangs there.

Structure only: counts no references, evicts nothing. Read next: `prefix.py`.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from twinspark.cache.ghosts import chain_digest, root_digest

ID_BYTES = 4


@dataclass(eq=False, slots=True)
class Node:
    """A whole page behind those of its parents. A root has no page, and the tag for a key."""

    key: bytes
    page: int
    depth: int
    digest: bytes
    parent: "Node | None"
    children: "dict[bytes, Node]" = field(default_factory=dict)
    checkpoints: "dict[bytes, Checkpoint]" = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A state at the tokens of `node` and `tail`; `tail_page` holds the tail, if it has tokens."""

    state_id: int
    node: Node
    tail: bytes
    tail_page: int | None
    is_encoder_only: bool

    def pages(self) -> Iterator[int]:
        """Every page it needs, the tail's first, then upward."""
        if self.tail_page is not None:
            yield self.tail_page
        node = self.node
        while node.parent is not None:
            yield node.page
            node = node.parent

    def pages_it_alone_needs(self) -> Iterator[int]:
        """The pages that leave the tree with it."""
        if self.tail_page is not None:
            yield self.tail_page
        node = self.node
        while node.parent is not None and len(node.children) + len(node.checkpoints) == 1:
            yield node.page
            node = node.parent


@dataclass(frozen=True, slots=True)
class Walk:
    """How far the tree knows some ids: nodes from the root, then the ids of the page behind."""

    path: list[Node]
    rest: bytes

    @property
    def end(self) -> Node:
        """The deepest node."""
        return self.path[-1]

    def upward(self) -> Iterator[tuple[Node, bytes]]:
        """Each node with the ids of the page behind it, deepest first."""
        following = self.rest
        for node in reversed(self.path):
            yield node, following
            following = node.key


class PrefixTree:
    """One tree a tag. Keys are ids as bytes and compared whole, so nothing rests on a hash."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._roots: dict[bytes, Node] = {}

    def has_tag(self, tag: str) -> bool:
        """Whether anything is kept under a tag."""
        return tag.encode() in self._roots

    def page_key(self, ids: Sequence[int], page_idx: int, limit: int) -> bytes:
        """The ids of one page, as far as they are below the limit."""
        start = page_idx * self.page_tokens
        page = ids[start : min(start + self.page_tokens, limit)]
        # a quarter less time for a prompt of 2^20 ids than array("i") (CPU, 2026-11-29)
        return struct.pack(f"={len(page)}i", *page)

    def is_whole(self, key: bytes) -> bool:
        """Whether these are the ids of a whole page."""
        return len(key) == self.page_tokens * ID_BYTES

    def position(self, node: Node, tail: bytes) -> int:
        """Tokens of a node's pages and a tail."""
        return node.depth * self.page_tokens + len(tail) // ID_BYTES

    def walk(self, ids: Sequence[int], tag: str, limit: int) -> Walk:
        """Down from the tag's root (a fresh one, not kept, if it has none) while pages agree."""
        tag_key = tag.encode()
        node = self._roots.get(tag_key) or Node(tag_key, -1, 0, root_digest(tag_key), None)
        path = [node]
        while True:
            rest = self.page_key(ids, node.depth, limit)
            child = node.children.get(rest)
            if child is None:
                return Walk(path, rest)
            node = child
            path.append(node)

    def common(self, walk: Walk) -> int:
        """Ids of the walk that something in the tree begins with."""
        best = 0
        for keys in (walk.end.children, walk.end.checkpoints):
            for key in keys:
                best = _common_ids(key, walk.rest, best)
        return walk.end.depth * self.page_tokens + best

    def add(self, walk: Walk, ids: Sequence[int], pages: Sequence[int]) -> Node:
        """The node behind all of these whole pages; nodes that are there keep their own."""
        root, node = walk.path[0], walk.end
        self._roots[root.key] = root
        for page in pages[node.depth :]:
            key = self.page_key(ids, node.depth, len(ids))
            child = Node(key, page, node.depth + 1, chain_digest(node.digest, key), node)
            node.children[key] = child
            node = child
        return node

    def remove(self, checkpoint: Checkpoint) -> Node:
        """Take a checkpoint out with the nodes only it needed; the node above those."""
        node = checkpoint.node
        del node.checkpoints[checkpoint.tail]
        while not node.children and not node.checkpoints:
            if node.parent is None:
                del self._roots[node.key]
                break
            del node.parent.children[node.key]
            node = node.parent
        return node

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def holders(self) -> Iterator[list[int]]:
        """The pages below each node, one entry for each time the tree needs a page."""
        for node in self.nodes():
            tail_pages = (checkpoint.tail_page for checkpoint in node.checkpoints.values())
            yield [
                *(child.page for child in node.children.values()),
                *(page for page in tail_pages if page is not None),
            ]

    def check_integrity(self) -> None:
        """Assert that every node is where its key says and leads to a checkpoint."""
        for node in self.nodes():
            assert node.children or node.checkpoints, "a node that leads to no checkpoint"
            for key, child in node.children.items():
                assert child.key == key and self.is_whole(key)
                assert child.parent is node and child.depth == node.depth + 1
            for tail, checkpoint in node.checkpoints.items():
                assert checkpoint.node is node and checkpoint.tail == tail
                assert not self.is_whole(tail)
                assert (checkpoint.tail_page is not None) == bool(tail)


def pages_of(checkpoints: Iterable[Checkpoint]) -> set[int]:
    """Pages that these checkpoints need."""
    return {page for checkpoint in checkpoints for page in checkpoint.pages()}


def _common_ids(key: bytes, other: bytes, best: int) -> int:
    """The larger of `best` and the number of ids both begin with."""
    longest = min(len(key), len(other))
    end = (best + 1) * ID_BYTES
    while end <= longest and key[:end] == other[:end]:
        end += ID_BYTES
    return end // ID_BYTES - 1
