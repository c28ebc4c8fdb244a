"""Tool calls of earlier replies: read from assistant messages and written as the model wrote them.

Prompt format 7. Broken arguments are no error: their text becomes one parameter, as the release's
own service does, so that a conversation with a bad turn in it can go on.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from twinspark.errors import RequestError
from twinspark.text.fields import json_text, read_object, read_text, shown
from twinspark.text.segments import Segment, marked
from twinspark.text.tokenizer import DSML, SURROGATE


@dataclass(frozen=True, kw_only=True)
class PastCall:
    """A call in the history.

    Attributes:
        name: of the function.
        call_id: what its result refers to; not rendered.
        parameters: name, text and whether the text is a string (else it is JSON), in order.
    """

    name: str
    call_id: str
    parameters: tuple[tuple[str, str, bool], ...]


def read_calls(raw: Any, where: str) -> tuple[PastCall, ...]:
    """Read `tool_calls` of an assistant message.

    Raises:
        RequestError: its shape is wrong; arguments that are no JSON object are not.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise RequestError(f"{where} must be a list", param=where)
    return tuple(_read_call(call, f"{where}[{n}]") for n, call in enumerate(raw))


def calls_block(calls: Sequence[PastCall]) -> list[Segment]:
    """The block that follows an assistant's content; names and values are plain text."""
    segments = marked(f"\n\n<{DSML} calls>\n")
    for call in calls:
        segments += [*marked(f"<{DSML} invoke"), Segment(f' name="{call.name}">\n')]
        segments += _parameters(call.parameters)
        segments += marked(f"\n</{DSML} invoke>\n")
    return segments + marked(f"</{DSML} calls>")


def _parameters(parameters: Iterable[tuple[str, str, bool]]) -> list[Segment]:
    segments: list[Segment] = []
    for n, (name, text, is_string) in enumerate(parameters):
        flag = "true" if is_string else "false"
        segments += marked("\n" * (n > 0) + f"<{DSML} parameter")
        segments.append(Segment(f' name="{name}" string="{flag}">{text}'))
        segments += marked(f"</{DSML} parameter>")
    return segments


def _read_call(raw: Any, where: str) -> PastCall:
    kind = read_object(raw, where).get("type", "function")
    if kind != "function":
        raise RequestError(
            f"{where}.type is {shown(kind)}, expected 'function'", param=f"{where}.type"
        )
    call_id = raw.get("id")
    function = read_object(raw.get("function"), f"{where}.function")
    return PastCall(
        name=read_text(function.get("name"), f"{where}.function.name"),
        call_id="" if call_id is None else read_text(call_id, f"{where}.id"),
        parameters=_read_arguments(function.get("arguments"), f"{where}.function.arguments"),
    )


def _read_arguments(raw: Any, where: str) -> tuple[tuple[str, str, bool], ...]:
    """Parameters of a JSON object in a string, or of an object; null has none."""
    if raw is None:
        return ()
    text = read_text(raw, where) if isinstance(raw, str) else json_text(raw, where)
    parsed = _parse_object(text)
    if parsed is None:
        return (("arguments", text, True),)
    return tuple(
        (name, value, True)
        if isinstance(value, str)
        else (name, json.dumps(value, ensure_ascii=False), False)
        for name, value in parsed.items()
    )


def _parse_object(text: str) -> Mapping[str, Any] | None:
    """The object that a text is, if every value of it can be written again."""
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
        again = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or SURROGATE.search(again):
        return None
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
