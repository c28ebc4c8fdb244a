"""Reads a request body into JSON: size and nesting limited while reading, no duplicate keys.

The shape scan removes strings, so what is left of them are brackets and colons: brackets give the
depth, and the number of colons is the number of members an object tree must have; fewer in the
parsed tree means that keys collided. Read next: `chat_fields.py` (what the JSON must contain).
"""

import json
import re
from asyncio import to_thread
from itertools import accumulate
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from twinspark.server.errors import ApiError, bad_request, shown

THREAD_BYTES = 256 * 1024
DRAIN_BYTES = 64 * 1024 * 1024
_LENGTH_DIGITS = 18  # of a Content-Length that is looked at as a number
MAX_CONTAINERS = 1_000_000
MAX_KEY_CHARS = 60  # of a key that an error names
_LONG_INTEGER = re.compile(rb"[\s:,\[]-?\d{19,}[\s,}\]]")
_NOT_BRACKET = bytes(sorted(set(range(256)) - set(b"[]{}")))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class ShapeScan:
    """Depth and number of members of a JSON text that arrives in pieces.

    It trusts nothing: on text that is no JSON the figures are still bounded, and the parser that
    runs afterwards gives the real error.
    """

    def __init__(self) -> None:
        self.members = 0
        self.containers = 0
        self.max_depth = 0
        self._depth = 0
        self._in_string = 0
        self._held = b""

    def feed(self, piece: bytes) -> None:
        """Look at the next bytes; costs about a nanosecond a byte."""
        # Inside a string a run of backslashes pairs up from its start; once the pairs and the
        # escaped quotes are gone, every quote left opens or closes a string.
        plain = (self._held + piece).replace(b"\\\\", b"")
        self._held = b"\\" if plain.endswith(b"\\") else b""
        parts = plain.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= (len(parts) - 1) & 1
        self.members += outside.count(b":")
        self._walk(outside.translate(None, _NOT_BRACKET))

    def _walk(self, brackets: bytes) -> None:
        if not brackets:
            return
        depths = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self._depth))
        self._depth = depths[-1]
        self.max_depth = max(self.max_depth, max(depths))
        self.containers += brackets.count(b"[") + brackets.count(b"{")


async def read_json_object(
    request: Request, *, max_body_bytes: int, max_nesting: int
) -> dict[str, Any]:
    """Read and parse a request body that must be one JSON object.

    Raises:
        ApiError: 400 for what is no such object, 413 for a body over the limit, 415 for a
            compressed one.
        ClientDisconnect: the client left while sending.
    """
    _check_encoding(request)
    _check_length(request, max_body_bytes)
    data, scan = await _read(request, max_body_bytes, max_nesting)
    if scan.max_depth > max_nesting:
        raise bad_request(
            f"the request body nests arrays and objects deeper than {max_nesting} levels",
            param="body",
        )
    if scan.containers > MAX_CONTAINERS:
        raise bad_request(
            f"the request body has more than {MAX_CONTAINERS} arrays and objects", param="body"
        )
    if len(data) > THREAD_BYTES:
        return await to_thread(_parse_object, data, scan.members)
    return _parse_object(data, scan.members)


def _check_encoding(request: Request) -> None:
    """Refuse a compressed body before it is read; the HTTP server drops what still comes of it."""
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if any(name.strip().lower() not in ("", "identity") for name in encoding.split(",")):
        raise ApiError(
            415,
            f"the request body has the content-encoding {shown(encoding)}; send it as it is",
            param="body",
            headers={"accept-encoding": "identity"},
        )


def _check_length(request: Request, limit: int) -> None:
    """Refuse a body at once that says it is longer than anything that would be read."""
    declared = request.headers.get("content-length", "")
    is_number = declared.isascii() and declared.isdecimal()
    if is_number and (len(declared) > _LENGTH_DIGITS or int(declared) > limit + DRAIN_BYTES):
        raise _too_long(limit, is_read=False)


def _too_long(limit: int, *, is_read: bool) -> ApiError:
    return ApiError(
        413,
        f"the request body is longer than {limit} bytes",
        param="body",
        headers={} if is_read else {"connection": "close"},
    )


async def _read(request: Request, limit: int, max_nesting: int) -> tuple[bytes, ShapeScan]:
    """Keep at most `limit` bytes; more is read and dropped, so that the refusal arrives."""
    scan = ShapeScan()
    pieces: list[bytes] = []
    total = 0
    complete = False
    while not complete and total <= limit + DRAIN_BYTES:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        piece = message.get("body", b"")
        complete = not message.get("more_body", False)
        total += len(piece)
        if total > limit:
            pieces.clear()
        elif piece and scan.max_depth <= max_nesting and scan.containers <= MAX_CONTAINERS:
            pieces.append(piece)
            scan.feed(piece)
    if total > limit:
        raise _too_long(limit, is_read=complete)
    return b"".join(pieces), scan


def _parse_object(data: bytes, members: int) -> dict[str, Any]:
    if not data.strip():
        raise bad_request("the request body is empty, expected a JSON object", param="body")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the request body is not valid JSON: {error}", param="body") from error
    if _LONG_INTEGER.search(data):  # orjson makes the nearest float of what 64 bits do not hold
        value = json.loads(data)
    if not isinstance(value, dict):
        raise bad_request(
            f"the request body is {_json_name(value)}, expected a JSON object", param="body"
        )
    if _count_members(value) != members:
        key = _find_duplicate(data)
        raise bad_request(
            f"the key {shown(key)} is written twice in one object; send it once",
            param=key[:MAX_KEY_CHARS],
        )
    return value


def _count_members(root: Any) -> int:
    count = 0
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            count += len(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return count


def _find_duplicate(data: bytes) -> str:
    found: list[str] = []

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found.append(key)
            seen.add(key)

    json.loads(data, object_pairs_hook=check)
    return found[0] if found else "body"


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
