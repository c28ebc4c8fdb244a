"""What a reply must look like, as the prompt says it: the response format section.

Prompt format 8. Holding a reply to a format is a grammar's business and happens in the engine.
"""

from collections.abc import Mapping
from typing import Any

from twinspark.errors import RequestError
from twinspark.text.fields import json_text, read_object, shown
from twinspark.text.segments import Segment

_HEADER = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_SILENT = ("text", "regex")  # nothing of them is written into the prompt
_FENCE = "```"


def read_format(request: Mapping[str, Any]) -> list[Segment]:
    """The section for `response_format`, or nothing.

    Raises:
        RequestError: the field is wrong; `param` names it.
    """
    raw = request.get("response_format")
    if raw is None:
        return []
    kind = read_object(raw, "response_format").get("type")
    if kind in _SILENT:
        return []
    if kind == "json_object":
        return [Segment(_HEADER + '{"type": "json_object"}')]
    if kind != "json_schema":
        known = ", ".join((*_SILENT, "json_object", "json_schema"))
        raise RequestError(
            f"response_format.type is {shown(kind)}, expected one of {known}",
            param="response_format.type",
        )
    where = "response_format.json_schema"
    schema = read_object(
        read_object(raw.get("json_schema"), where).get("schema"), f"{where}.schema"
    )
    return [Segment(_HEADER + json_text(schema, f"{where}.schema"))]


def unfenced(content: str) -> str:
    """The inside of a reply that is one fenced block; any other reply as it is.

    For replies that were asked for JSON and that no grammar held to it.
    """
    first, found, rest = content.strip().partition("\n")
    if not found or first.rstrip() not in (_FENCE, f"{_FENCE}json") or not rest.endswith(_FENCE):
        return content
    inside = rest.removesuffix(_FENCE)
    return content if _FENCE in inside else inside.rstrip()
