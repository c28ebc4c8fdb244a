"""A client that reads replies as strict clients do, and markup for scripts."""

import json
from collections.abc import Iterable
from typing import Any

import httpx

from twinspark.text.tokenizer import DSML

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OPEN, CLOSE = f"<{DSML} calls>\n", f"</{DSML} calls>"


class Api:
    """One server, over one connection."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        return self.post(CHAT, question(text) | fields)

    def message(self, text: str = "Hello", **fields: Any) -> dict[str, Any]:
        """The whole reply in the form of `glue`."""
        reply = self.chat(text, **fields)
        assert reply.status_code == 200, reply.text
        return whole(reply.json())

    def events(self, body: dict[str, Any], path: str = CHAT) -> list[str]:
        """Data payloads of a stream, in order, "[DONE]" included."""
        reply = self.post(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        return payloads(reply.text)

    def streamed(self, text: str = "Hello", **fields: Any) -> dict[str, Any]:
        """A streamed reply as a strict client joins it."""
        return glue(self.events(question(text) | fields))

    def both(self, text: str = "Hello", **fields: Any) -> dict[str, Any]:
        """A reply, after it was found to be the same streamed and whole, call ids aside."""
        found, expected = self.streamed(text, **fields), self.message(text, **fields)
        assert without_ids(found) == without_ids(expected)
        return expected


def question(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields


def payloads(text: str) -> list[str]:
    parts = [part for part in text.split("\n\n") if part]
    assert text == "".join(part + "\n\n" for part in parts)
    return [part.removeprefix("data: ") for part in parts if not part.startswith(":")]


def glue(found: Iterable[str]) -> dict[str, Any]:
    """Deltas joined; every delta must say something, names and ids come once."""
    text, thought, finish = "", "", []
    calls: dict[int, dict[str, str]] = {}
    for item in (json.loads(payload) for payload in found if payload != "[DONE]"):
        for choice in item["choices"]:
            delta = choice["delta"]
            assert delta.get("tool_calls") != []
            text += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or []:
                if part["index"] not in calls:
                    assert part["type"] == "function" and part["id"] and part["function"]["name"]
                    calls[part["index"]] = {
                        "id": part["id"], "name": part["function"]["name"], "arguments": ""
                    }  # fmt: skip
                else:
                    assert "id" not in part and "name" not in part["function"]
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
            if choice["finish_reason"]:
                finish.append(choice["finish_reason"])
    assert len(finish) == 1 and sorted(calls) == list(range(len(calls)))
    return {
        "content": text,
        "reasoning": thought,
        "tool_calls": [calls[n] for n in sorted(calls)],
        "finish": finish[0],
    }


def whole(reply: dict[str, Any]) -> dict[str, Any]:
    """An unstreamed reply in the form of `glue`."""
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "tool_calls": [{"id": call["id"], **call["function"]} for call in calls],
        "finish": choice["finish_reason"],
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"id": ""} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def tool(name: str = "f", properties: Any = None, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}}
    function = {"name": name, "description": "", "parameters": parameters, **fields}
    return {"type": "function", "function": function}


def value(key: str, text: str, flag: str | None = "true") -> str:
    attribute = "" if flag is None else f' string="{flag}"'
    return f'<{DSML} parameter name="{key}"{attribute}>{text}</{DSML} parameter>\n'


def call(*values: str, name: str = "f") -> str:
    return f'<{DSML} invoke name="{name}">\n{"".join(values)}</{DSML} invoke>\n'


def block(*calls: str) -> str:
    return OPEN + "".join(calls) + CLOSE
