"""Request heads that do not come end their connection; others do not notice."""

import asyncio
import json
import resource

import pytest
import uvicorn

from twinspark.server import connections
from twinspark.server.connections import HeadLimitProtocol, allow_many_files


async def app(scope, receive, send):
    await asyncio.sleep(0.5)  # longer than a head may take below
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


async def echo(scope, receive, send):
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    length = str(len(body)).encode()
    headers = [(b"content-length", length), (b"x-of", scope["path"].encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def ask(pieces, *, pause=0.0, keep_alive_s=5, app=app):
    """What a server with a limit of 0.3 s answers to these bytes, and whether it closed."""
    config = uvicorn.Config(
        app, http=HeadLimitProtocol, ws="none", lifespan="off", log_config=None, port=0,
        timeout_keep_alive=keep_alive_s,
    )  # fmt: skip
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause)
    try:
        async with asyncio.timeout(1.5):
            while data := await reader.read(1000):
                answer += data
        closed = True
    except TimeoutError:
        closed = False
    writer.close()
    server.should_exit = True
    await task
    return answer, closed


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "REST_S", 0.3)


WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("pieces", [[], [b"GET /hea"], [WHOLE[:-2]]])
def test_a_head_that_does_not_come_ends_the_connection(pieces):
    answer, closed = asyncio.run(ask(pieces))
    assert closed and b"200" not in answer


def test_a_whole_head_has_its_reply_however_long_that_takes():
    answer, closed = asyncio.run(ask([WHOLE]))
    assert answer.endswith(b"ok") and not closed


def test_the_second_head_of_a_connection_is_bounded_too():
    answer, closed = asyncio.run(ask([WHOLE, b"GET / HT"], pause=0.7))
    assert answer.endswith(b"ok") and closed


def post(num_bytes):
    return b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % num_bytes


@pytest.mark.parametrize("pieces", [[post(9)], [post(9), b"1"], [post(900), *[b"1" * 20] * 6]])
def test_the_rest_of_an_answered_body_is_not_awaited_for_ever(pieces):
    answer, closed = asyncio.run(ask(pieces, pause=0.1))
    assert answer.endswith(b"ok") and closed


def test_the_rest_of_an_answered_body_may_come_slowly():
    pieces = [post(4000), *[b"1" * 200] * 20]
    answer, closed = asyncio.run(ask([*pieces, WHOLE], pause=0.1))
    assert answer.count(b"ok") == 2 and not closed


@pytest.mark.parametrize("pieces", [[post(9) + b"1", b"1" * 8], [post(9) + b"1" * 9]])
def test_a_connection_rests_for_a_time_only_after_a_late_body_too(pieces):
    answer, closed = asyncio.run(ask(pieces, pause=0.7, keep_alive_s=0.3))
    assert answer.endswith(b"ok") and closed


def test_a_request_behind_a_late_body_may_take_longer_than_a_connection_may_rest():
    pieces = [post(9) + b"1", b"1" * 8 + WHOLE]
    answer, closed = asyncio.run(ask(pieces, pause=0.6, keep_alive_s=0.2))
    assert answer.count(b"ok") == 2 and closed


def test_a_body_behind_another_request_is_the_app_s_to_await():
    answer, closed = asyncio.run(ask([WHOLE + post(9)], pause=0.1))
    assert answer.count(b"ok") == 2 and closed  # both replies, then the rest's limit


def test_the_limit_of_files_rises_as_far_as_it_may():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "bad", [b"GET nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"{}\r\n\r\n"]
)
def test_what_is_no_http_gets_the_errors_of_all_refusals(bad):
    answer, closed = asyncio.run(ask([bad]))
    head, body = answer.split(b"\r\n\r\n")
    assert closed and head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert f"content-length: {len(body)}".encode() in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "bad_http")


H2C = (
    b"POST /%d HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAE\r\nContent-Length: 4\r\n\r\nbo%02d"
)


@pytest.mark.parametrize("cut", [None, 40, 130, -2], ids=str)
def test_a_request_that_asks_for_another_protocol_is_served_with_its_body(cut):
    text = H2C % (1, 1)
    pieces = [text] if cut is None else [text[:cut], text[cut:]]
    answer, closed = asyncio.run(ask(pieces, pause=0.02, app=echo))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\nbo01") and not closed


def test_such_requests_may_follow_each_other_and_others():
    plain = b"GET /9 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answer, closed = asyncio.run(ask([H2C % (1, 1) + H2C % (2, 2) + plain], app=echo))
    assert closed and answer.count(b"HTTP/1.1 200") == 3
    assert [f"x-of: /{n}".encode() in answer for n in (1, 2, 9)] == [True] * 3
    assert b"bo01HTTP" in answer and b"bo02HTTP" in answer
    chunked = H2C.replace(b"Content-Length: 4", b"Transfer-Encoding: chunked")
    text = chunked.replace(b"bo%02d", b"3\r\nabc\r\n0\r\n\r\n") % 5
    answer, _ = asyncio.run(ask([text], app=echo))
    assert answer.endswith(b"\r\n\r\nabc")
    last = H2C.replace(b"Upgrade, HTTP2", b"Upgrade, close, HTTP2") % (1, 1)
    answer, closed = asyncio.run(ask([last], app=echo))
    assert answer.endswith(b"bo01") and closed


def test_a_websocket_and_a_tunnel_are_no_reason_to_hang():
    answer, _ = asyncio.run(ask([H2C.replace(b"h2c", b"websocket") % (1, 1)], app=echo))
    assert answer.endswith(b"bo01")
    answer, closed = asyncio.run(ask([b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n"], app=echo))
    assert answer.startswith(b"HTTP/1.1 400") and b"bad_http" in answer and closed


def test_a_head_behind_a_long_reply_has_its_time_afterwards():
    later = b"GET /2 HTTP/1.1\r\nHost: a\r\n"  # the reply takes longer than a head may
    answer, closed = asyncio.run(ask([WHOLE + later[:5], later[5:], b"\r\n"], pause=0.2))
    assert answer.count(b"HTTP/1.1 200") == 2 and not closed
    answer, closed = asyncio.run(ask([WHOLE + later]))
    assert answer.count(b"HTTP/1.1 200") == 1 and closed


def test_what_is_no_http_behind_a_request_leaves_its_reply():
    answer, closed = asyncio.run(ask([WHOLE + b"garbage\r\n\r\n"]))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok") and closed


def test_who_leaves_with_two_requests_under_way_ends_the_first():
    left = []

    async def waits(scope, receive, send):
        await receive()
        left.append((await receive())["type"])

    asyncio.run(ask([WHOLE + WHOLE], app=waits))
    assert left[:1] == ["http.disconnect"]


BROKEN = b"POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n"


def test_a_body_that_breaks_off_its_form_is_refused_at_once():
    answer, closed = asyncio.run(ask([BROKEN], app=echo))
    assert answer.startswith(b"HTTP/1.1 400") and b"bad_http" in answer and closed


def test_such_a_body_behind_another_request_leaves_its_reply():
    answer, closed = asyncio.run(ask([WHOLE + BROKEN]))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok") and closed


def test_more_behind_a_last_request_is_not_looked_at():
    last = H2C.replace(b"Upgrade, HTTP2", b"Upgrade, close, HTTP2") % (1, 1)
    answer, closed = asyncio.run(ask([last + b"more"], app=echo))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"bo01") and closed


def test_a_request_without_a_body_may_ask_for_another_protocol():
    text = b"GET /1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    answer, closed = asyncio.run(ask([text + text.replace(b" /1", b" /2")], app=echo))
    assert answer.count(b"HTTP/1.1 200") == 2 and b"x-of: /2" in answer and not closed
