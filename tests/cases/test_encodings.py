"""The encoding of a request's body: what changes nothing passes, any other is refused at once."""

from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from tests.cases.api import CHAT, Api

BODY = b"{}"  # refused with 400, once it is read as JSON
LONG = 3_000_000


@pytest.fixture
def wire(api: Api) -> Iterator[HTTPConnection]:
    url = api.http.base_url
    connection = HTTPConnection(url.host, url.port, timeout=10)
    yield connection
    connection.close()


def begin(wire: HTTPConnection, encodings: list[str], length: int) -> None:
    wire.putrequest("POST", CHAT)
    wire.putheader("content-length", str(length))
    for encoding in encodings:
        wire.putheader("content-encoding", encoding)
    wire.endheaders()


def status(wire: HTTPConnection) -> int:
    reply = wire.getresponse()
    reply.read()
    return reply.status


@pytest.mark.parametrize(
    "encodings",
    [[], [""], ["identity"], ["identity, identity"], ["Identity \t"], [", identity ,"],
     ["identity", "IDENTITY"], ["", ""]],
)  # fmt: skip
def test_an_encoding_that_changes_nothing_is_none(
    wire: HTTPConnection, encodings: list[str]
) -> None:
    begin(wire, encodings, len(BODY))
    wire.send(BODY)
    assert status(wire) == 400


@pytest.mark.parametrize(
    "encodings", [["gzip"], ["identity, br"], ["identity", "zstd"], ["identity;q=1"], ["chunked"]]
)
def test_any_other_is_refused_before_the_body_comes(
    wire: HTTPConnection, encodings: list[str]
) -> None:
    """The connection is good for the next request once the client has sent what it promised."""
    begin(wire, encodings, LONG)
    wire.send(b"x" * 10)
    assert status(wire) == 415
    socket = wire.sock
    wire.send(b"x" * (LONG - 10))
    begin(wire, [], len(BODY))
    wire.send(BODY)
    assert status(wire) == 400 and wire.sock is socket
