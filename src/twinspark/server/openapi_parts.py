"""Parts of the API description that no class of the server states. Read next: `openapi.py`."""

from collections.abc import Iterable
from typing import Any

from twinspark.messages import (
    APPROXIMATIONS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
)
from twinspark.server.completion_fields import MAX_REPLIES

ANTHROPIC_ERROR = "AnthropicError"


def reference(name: str) -> dict[str, str]:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _or_null(*forms: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*forms, {"type": "null"}]}


def only(values: Iterable[Any]) -> dict[str, Any]:
    """A field that is not served: what asks for nothing passes."""
    return {"enum": [*values, None]}


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_LIST = {"type": "array"}
_ANY: dict[str, Any] = {}
_TEXT_PART = _object(["type", "text"], type={"const": "text"}, text=_TEXT)
_PARTS = {"type": "array", "items": _TEXT_PART}
_CONTENT = {"anyOf": [_TEXT, _PARTS]}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}

_IDS = {"type": "array", "items": {**_COUNT, "description": "Below the vocabulary's size."}}
PROMPT: dict[str, Any] = {
    "description": f"A text, a list of token ids, or several of either; prompts times n are "
    f"{MAX_REPLIES} at most.",
    "anyOf": [
        _TEXT,
        {**_IDS, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_REPLIES,
            "items": {"anyOf": [_TEXT, {**_IDS, "minItems": 1}]},
        },
    ],
}

# Fields whose class takes more forms than it states.
FORMS: dict[str, Any] = {
    "stop": _or_null(_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}),
    "logit_bias": _or_null(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {
                "type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS,
            },
        }
    ),
    "banned_token_ids": _or_null(_IDS),
    "allowed_token_ids": _or_null({**_IDS, "minItems": 1}),
    "tokens": _IDS,
    "approximations": _or_null({"type": "array", "items": {"enum": list(APPROXIMATIONS)}}),
    "loop_guard": _or_null({"enum": ["off", "gentle"]}, {"type": "boolean"}),
    "stream_options": _or_null(
        {"type": "object", "properties": {"include_usage": _or_null({"type": "boolean"})}}
    ),
}  # fmt: skip

_EFFORT = {
    "description": "none and minimal do not think; low is 50, medium and high 75, the rest 100.",
    "anyOf": [
        {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]},
        {"type": "integer", "minimum": 1, "maximum": 100},
        {"type": "null"},
    ],
}
_CALL = _object(
    ["id", "type", "function"],
    id=_TEXT,
    type={"const": "function"},
    function=_object(["name", "arguments"], name=_TEXT, arguments=_TEXT),
)
_MESSAGE = {
    "anyOf": [
        _object(
            ["role", "content"], role={"enum": ["system", "developer", "user"]}, content=_CONTENT
        ),
        _object(
            ["role"],
            role={"const": "assistant"},
            content=_or_null(_CONTENT),
            reasoning_content=_or_null(_TEXT),
            tool_calls=_or_null({"type": "array", "items": _CALL}),
        ),
        _object(
            ["role", "content"],
            role={"const": "tool"},
            content=_CONTENT,
            tool_call_id=_TEXT,
        ),
    ]
}
_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]+$"}
_FUNCTION_FIELDS = {
    "name": _NAME,
    "description": _or_null(_TEXT),
    "parameters": _or_null({"type": "object"}),
    "strict": _or_null({"type": "boolean"}),
}
_FUNCTION = _object(["name"], **_FUNCTION_FIELDS)
_RESPONSES_FUNCTION = _object(["type", "name"], type={"const": "function"}, **_FUNCTION_FIELDS)
TEXT_FIELDS: dict[str, Any] = {
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "tools": _or_null(
        {
            "type": "array",
            "items": _object(["type", "function"], type={"const": "function"}, function=_FUNCTION),
        }
    ),
    "tool_choice": _or_null({"enum": ["auto", "none", "required"]}, {"type": "object"}),
    "parallel_tool_calls": _or_null({"type": "boolean"}),
    "response_format": _or_null({"type": "object"}),
    "reasoning_effort": _EFFORT,
    "chat_template_kwargs": _or_null({"type": "object"}),
    "thinking": _or_null({"type": "object"}),
    "guided_json": _or_null({"type": ["object", "boolean", "string"]}),
    "guided_regex": _or_null(_TEXT),
    "guided_choice": _or_null({"type": "array", "minItems": 1, "items": _TEXT}),
    "guided_grammar": _or_null(_TEXT),
    "structured_outputs": _or_null({"type": "object"}),
}

_OTHER_BLOCKS = [
    "document", "redacted_thinking", "search_result", "thinking", "tool_result", "tool_use",
]  # fmt: skip
_BLOCK = {
    "anyOf": [
        _TEXT_PART,
        _object(["type"], type={"enum": _OTHER_BLOCKS}),
    ]
}
_BLOCKS = {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]}
_ANTHROPIC_TOOL = _object(
    ["name", "input_schema"],
    name=_NAME,
    description=_TEXT,
    input_schema={"type": "object"},
)
MESSAGES_BODY = _object(
    ["messages"],
    model=_or_null(_TEXT),
    max_tokens=_or_null({"type": "integer", "minimum": 1}),
    messages={
        "type": "array",
        "minItems": 1,
        "items": _object(
            ["role", "content"], role={"enum": ["user", "assistant"]}, content=_BLOCKS
        ),
    },
    system=_or_null(_CONTENT),
    stop_sequences=_or_null({"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}),
    stream=_or_null({"type": "boolean"}),
    temperature=_or_null({"type": "number", "minimum": 0}),
    top_p=_or_null({"type": "number", "minimum": 0, "maximum": 1}),
    top_k=_or_null({"type": "integer"}),
    tools=_or_null({"type": "array", "items": _ANTHROPIC_TOOL}),
    tool_choice=_or_null(_object(["type"], type={"enum": ["auto", "any", "tool", "none"]})),
    thinking=_or_null(
        _object(
            ["type"],
            type={"enum": ["enabled", "adaptive", "disabled"]},
            budget_tokens=_or_null(_COUNT),
        )
    ),
    output_config=_or_null({"type": "object"}),
)  # fmt: skip
_RESPONSES_TOOLS = {
    "anyOf": [
        _RESPONSES_FUNCTION,
        _object(
            ["type", "name", "tools"],
            type={"const": "namespace"},
            name=_NAME,
            tools={"type": "array", "items": _RESPONSES_FUNCTION},
        ),
        _object(
            ["type"],
            type={
                "description": "Left out, and listed in x-twinspark-ignored-fields.",
                "type": "string",
                "pattern": "^(web_search|file_search|image_generation|code_interpreter)",
            },
        ),
    ]
}
RESPONSES_BODY = _object(
    ["input"],
    model=_or_null(_TEXT),
    input={"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"type": "object"}}]},
    instructions=_or_null(_TEXT),
    previous_response_id=_or_null(_TEXT),
    max_output_tokens=_or_null({"type": "integer", "minimum": 1}),
    stream=_or_null({"type": "boolean"}),
    store=_or_null({"type": "boolean"}),
    temperature=_or_null({"type": "number", "minimum": 0}),
    top_p=_or_null({"type": "number", "minimum": 0, "maximum": 1}),
    tools=_or_null({"type": "array", "items": _RESPONSES_TOOLS}),
    tool_choice=_or_null({"enum": ["auto", "none", "required"]}, {"type": "object"}),
    parallel_tool_calls=_or_null({"type": "boolean"}),
    reasoning=_or_null({"type": "object", "properties": {"effort": _EFFORT}}),
    text=_or_null({"type": "object", "properties": {"verbosity": only(["medium"])}}),
    include=_or_null(
        {"type": "array", "items": {**_TEXT, "not": {"const": "message.output_text.logprobs"}}}
    ),
    metadata=_or_null({"type": "object"}),
)

_USAGE = _object(
    ["prompt_tokens", "completion_tokens", "total_tokens"],
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
)
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_STATS = _object(["seed", "token_sha", "finish", "cause"], seed=_COUNT, token_sha=_TEXT)

COMPONENTS: dict[str, Any] = {
    "Error": _object(
        ["error"],
        error=_object(
            ["message", "type", "param", "code"],
            message=_TEXT,
            type=_TEXT,
            param=_or_null(_TEXT),
            code=_or_null(_TEXT),
        ),
    ),
    ANTHROPIC_ERROR: _object(
        ["type", "error"],
        type={"const": "error"},
        error=_object(["type", "message"], type=_TEXT, message=_TEXT),
    ),
    "ChatReply": _object(
        ["id", "object", "created", "model", "choices", "usage", "stats"],
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_COUNT,
        model=_TEXT,
        choices={
            "type": "array",
            "items": _object(
                ["index", "message", "finish_reason"],
                index=_COUNT,
                finish_reason=_FINISH,
                message=_object(["role", "content"], role={"const": "assistant"}),
            ),
        },
        usage=_USAGE,
        stats=_STATS,
    ),
    "CompletionReply": _object(
        ["id", "object", "created", "model", "choices", "usage", "stats"],
        object={"const": "text_completion"},
        choices={
            "type": "array",
            "items": _object(["index", "text", "finish_reason"], text=_TEXT, finish_reason=_FINISH),
        },
        usage=_USAGE,
    ),
    "Message": _object(
        ["id", "type", "role", "model", "content", "stop_reason", "usage"],
        type={"const": "message"},
        role={"const": "assistant"},
        content={"type": "array", "items": _object(["type"], type=_TEXT)},
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        usage=_object(["input_tokens", "output_tokens"], input_tokens=_COUNT, output_tokens=_COUNT),
        stats=_STATS,
    ),
    "InputTokens": _object(["input_tokens"], input_tokens=_COUNT),
    "Response": _object(
        ["id", "object", "status", "model", "output", "usage"],
        object={"const": "response"},
        status={"enum": ["completed", "incomplete"]},
        output={"type": "array", "items": _object(["id", "type"], id=_TEXT, type=_TEXT)},
        stats=_STATS,
    ),
    "Deleted": _object(["id", "object", "deleted"], id=_TEXT, deleted={"const": True}),
    "List": _object(["object", "data"], object={"const": "list"}, data=_LIST),
    "Model": _object(
        ["id", "object", "max_model_len"], id=_TEXT, object={"const": "model"}, max_model_len=_COUNT
    ),
    "Tokens": _object(
        ["count", "max_model_len", "tokens"],
        count=_COUNT,
        max_model_len=_COUNT,
        tokens={"type": "array", "items": _COUNT},
    ),
    "Prompt": _object(["prompt"], prompt=_TEXT),
    "Health": _object(
        ["status"], status={"enum": ["ok", "loading", "stalled", "draining", "failed"]}
    ),
    "Stats": _object(["health", "open", "recent"], health=_ANY, open=_LIST, recent=_LIST),
}
