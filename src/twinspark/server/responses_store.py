"""Responses that were given, for clients that go on from one by its id. Lost on restart.

Each belongs to the key that asked for it. Read next: `responses.py`.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from twinspark.server.errors import ApiError, bad_request

MAX_ENTRIES = 1024
MAX_BYTES = 256 * 1024 * 1024
_WHY = "it was never kept, has made room for newer ones, or was lost with a restart"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One response.

    Attributes:
        response: the object as it was sent.
        items: its own input, without that of the responses before it.
        owner: scope of the key whose it is.
        num_bytes: what it takes.
    """

    response: Mapping[str, Any]
    items: tuple[Mapping[str, Any], ...]
    owner: str
    num_bytes: int


class ResponseStore:
    """The newest responses, within a number and a size."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: Mapping[str, Any], items: list[Any], *, owner: str) -> None:
        """Keep a response; the oldest make room."""
        size = len(orjson.dumps(response)) + len(orjson.dumps(items))
        stored = Stored(response=response, items=tuple(items), owner=owner, num_bytes=size)
        self._entries[response["id"]] = stored
        self._num_bytes += size
        for item in response["output"]:
            self._items[item["id"]] = (owner, item)
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def get(self, response_id: str, *, owner: str) -> Stored:
        """A response by its id.

        Raises:
            ApiError: 404, there is none, or it is another key's.
        """
        stored = self._find(response_id, owner)
        if stored is None:
            raise ApiError(
                404,
                f"the response {response_id[:80]!r} is not stored here; {_WHY}",
                param="response_id",
                code="response_not_found",
            )
        return stored

    def _find(self, response_id: str, owner: str) -> Stored | None:
        stored = self._entries.get(response_id)
        return stored if stored is not None and stored.owner == owner else None

    def remove(self, response_id: str, *, owner: str) -> None:
        """Forget a response.

        Raises:
            ApiError: 404, there is none, or it is another key's.
        """
        self.get(response_id, owner=owner)
        self._drop(response_id)

    def history(self, response_id: str, *, owner: str) -> list[Mapping[str, Any]]:
        """Items of a response and of all before it, oldest first.

        Raises:
            ApiError: 400, one of them is gone. Clients that look for OpenAI's code send all again.
        """
        turns = []
        next_id: str | None = response_id
        while next_id is not None:
            stored = self._find(next_id, owner)
            if stored is None:
                raise bad_request(
                    f"Previous response with id {next_id[:80]!r} not found; {_WHY}",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            turns.append([*stored.items, *stored.response["output"]])
            next_id = stored.response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    def item(self, item_id: str, *, owner: str) -> Mapping[str, Any] | None:
        """An output item by its id."""
        found, item = self._items.get(item_id, (None, None))
        return item if found == owner else None

    def _drop(self, response_id: str) -> None:
        stored = self._entries.pop(response_id)
        self._num_bytes -= stored.num_bytes
        for item in stored.response["output"]:
            self._items.pop(item["id"], None)
