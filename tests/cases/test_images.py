"""Images, which are not served: refused by their place, and nothing is decoded or fetched.

R42, R44, R45.
"""

import base64
import json
import socket
import struct
import time
import zlib
from typing import Any

import pytest
from tests.cases.api import CHAT, Api
from tests.scripted_engine import ScriptedEngine

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "Look."}


def png(side: int) -> str:
    """A data URL of a picture of one colour, as its header says `side` pixels wide and high."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * min(side, 1000)), 9)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def block(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    data = url.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def bodies(url: str) -> list[tuple[str, dict[str, Any], str]]:
    """Route, body and the place of the image in it, for every place that a client may put one."""
    text = {"type": "text", "text": "Look."}
    function = {"name": "see", "arguments": "{}"}
    call = {"id": "a", "type": "function", "function": function}
    called = {"role": "assistant", "tool_calls": [call]}
    use = {"type": "tool_use", "id": "a", "name": "see", "input": {}}
    used = {"role": "assistant", "content": [use]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, block(url)]}
    return [
        (CHAT, {"messages": [{"role": "user", "content": [text, chat_part(url)]}]},
         "messages[0].content[1].type"),
        (CHAT, {"messages": [{"role": "system", "content": [chat_part(url)]}, USER]},
         "messages[0].content[0].type"),
        (CHAT, {"messages": [USER, called,
                             {"role": "tool", "tool_call_id": "a", "content": [chat_part(url)]}]},
         "messages[2].content[0].type"),
        ("/tokenize", {"messages": [{"role": "user", "content": [chat_part(url)]}]},
         "messages[0].content[0].type"),
        (MESSAGES, {"messages": [{"role": "user", "content": [text, block(url)]}]},
         "messages[0].content[1].type"),
        (MESSAGES, {"messages": [USER, used, {"role": "user", "content": [result]}]},
         "messages[2].content[0].content[1].type"),
        (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": [block(url)]}]},
         "messages[0].content[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": [input_image(url)]}]},
         "input[0].content[0].type"),
        (RESPONSES, {"input": [
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [input_image(url)]}]},
         "input[2].output[0].type"),
    ]  # fmt: skip


def refusals(api: Api, engine: ScriptedEngine, url: str) -> None:
    """Every place of an image is refused, by its place, and nothing runs."""
    for path, body, place in bodies(url):
        for more in ({}, {"stream": True}):
            reply = api.post(path, body | more)
            assert reply.status_code == 400, (path, place, reply.text)
            error = reply.json()["error"]
            assert (error["param"], error["code"]) == (place, "unsupported")
            assert "image" in error["message"] and len(error["message"]) < 300
            assert (reply.json().get("type") == "error") is path.startswith(MESSAGES)
    assert not engine.requests
    assert api.chat("And now?").status_code == 200


def test_r44_an_image_is_refused_wherever_it_stands(api: Api, engine: ScriptedEngine) -> None:
    engine.play(["seen"])
    refusals(api, engine, png(8))


def test_r42_a_huge_picture_is_refused_without_decoding_it(
    api: Api, engine: ScriptedEngine
) -> None:
    engine.play(["seen"])
    began = time.process_time()  # of client and server: this is one process
    refusals(api, engine, png(30_000))
    assert time.process_time() - began < 5
    many = [chat_part(png(30_000))] * 8
    reply = api.post(CHAT, {"messages": [{"role": "user", "content": many}]})
    assert reply.status_code == 400


FORMS = (
    "127.0.0.1:{port}", "localhost:{port}", "2130706433:{port}", "0x7f000001:{port}",
    "0177.0.0.1:{port}", "127.1:{port}", "[::1]:{port}", "[::ffff:127.0.0.1]:{port}",
    "user:word@127.0.0.1:{port}", "0.0.0.0:{port}",
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_r45_no_address_is_fetched(api: Api, scheme: str) -> None:
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        for form in FORMS:
            url = f"{scheme}://{form.format(port=port)}/cat.png"
            for path, body, place in bodies(url):
                reply = api.post(path, body)
                assert reply.status_code == 400 and reply.json()["error"]["param"] == place
        with pytest.raises(TimeoutError):
            listener.accept()


def test_images_are_not_said_to_be_served(api: Api) -> None:
    """What is told where the type of a part is unknown."""
    for path, body, place in bodies("odd"):
        text = json.dumps(body)
        for kind in ("image_url", "input_image", "image"):
            text = text.replace(f'"type": "{kind}"', '"type": "odd"')
        reply = api.post(path, json.loads(text))
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == place
        assert "'odd'" in error["message"] and "text" in error["message"]
        assert "image" not in error["message"]
        is_inside = path == MESSAGES and place.startswith("messages[2]")
        assert not (is_inside and "tool_result" in error["message"]), "a result holds no others"
