"""Chat messages to prompt: which special tokens stand where, and what is client text.

Prompt format 3 to 11. Checked messages come from `conversation.py`, tools from `tools.py`, response
formats from `formats.py`; prompts without messages are `completion.py`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from twinspark.errors import RequestError
from twinspark.text.content import JOINT, ImagePart
from twinspark.text.conversation import ChatMessage, read_messages, refuse_unsupported
from twinspark.text.fields import Feature
from twinspark.text.formats import read_format
from twinspark.text.history import calls_block
from twinspark.text.segments import Segment, encode_segments, special
from twinspark.text.thinking import Thinking, resolve_thinking
from twinspark.text.tokenizer import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    SYSTEM,
    THINK,
    USER,
    Tokenizer,
)
from twinspark.text.tool_calls import CallRules
from twinspark.text.tools import ToolOffer, read_tools

EFFORT_LINE = (
    "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered chat request.

    Attributes:
        segments: in order; plain ones may be adjacent.
        in_reasoning: the reply starts inside a thinking block.
        continues: the prompt ends with the client's own start of the reply.
        calls: how the reply's tool calls are read; None if it may have none.
        forced: what must follow the reply's thinking block, because a call was asked for; empty
            if nothing must, or if the prompt holds it already.
        images: one for each placeholder, in order.
    """

    segments: tuple[Segment, ...]
    in_reasoning: bool
    continues: bool = False
    calls: CallRules | None = None
    forced: tuple[Segment, ...] = ()
    images: tuple[ImagePart, ...] = ()

    @property
    def text(self) -> str:
        """The prompt as text. For reading only: encoding it again would not be safe."""
        return "".join(segment.text for segment in self.segments)

    @cached_property
    def num_characters(self) -> int:
        """Its length as text."""
        return sum(len(segment.text) for segment in self.segments)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's ids, at least one."""
        return encode_segments(tokenizer, self.segments)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A checked request.

    Attributes:
        messages: at least one.
        thinking: whether the reply thinks, and how hard.
        offer: the tools it may call.
        response_format: the section about it, or nothing.
        restored: replies in it whose reasoning was put back by `memory.py`.
    """

    messages: tuple[ChatMessage, ...]
    thinking: Thinking
    offer: ToolOffer | None = None
    response_format: tuple[Segment, ...] = ()
    restored: int = field(default=0, compare=False)


def render_request(
    request: Mapping[str, Any],
    *,
    default: Thinking | None = None,
    serves: Collection[Feature] = (),
) -> ChatPrompt:
    """Render the body of a chat completion request.

    Args:
        request: the JSON body; only the fields that shape the prompt are read.
        default: thinking and effort where the request says nothing.
        serves: what the caller can follow through with; the rest is refused by name.

    Raises:
        RequestError: a field is wrong or not served; `param` names it.
    """
    return render_chat(read_request(request, default=default, serves=serves))


def read_request(
    request: Mapping[str, Any],
    *,
    default: Thinking | None = None,
    serves: Collection[Feature] = (),
) -> ChatRequest:
    """Check the body of a chat completion request. Arguments and errors as `render_request`."""
    refuse_unsupported(request, serves)
    offer = read_tools(request)
    messages = read_messages(request, serves)
    if offer is not None and messages[-1].prefix:
        raise RequestError(
            "a reply with tools cannot continue a message; leave out tools or the prefix",
            param="tools",
        )
    if offer is not None and offer.choice != "auto" and messages[-1].task:
        raise RequestError(
            "a task takes the place of the reply, so it cannot go with a required tool",
            param="tool_choice",
        )
    return ChatRequest(
        messages=tuple(messages),
        thinking=resolve_thinking(request, default=default),
        offer=offer,
        response_format=tuple(read_format(request)),
    )


def render_chat(request: ChatRequest) -> ChatPrompt:
    """Render a checked request."""
    messages = _with_head_message(request)
    thinks = request.thinking.enabled
    segments = list(_head(messages, request.thinking))
    asking = [n for n, message in enumerate(messages) if _asks(message, n)]
    first_with_reasoning = 0 if request.offer else max(asking, default=-1) + 1
    images: list[ImagePart] = []
    call_order: dict[str, int] = {}
    position = 0
    for is_turn, group in groupby(messages, lambda message: message.role in ("user", "tool")):
        run = list(group)
        if is_turn:
            run = _in_order(run, call_order)
            segments += [*_turn(run), *_task_header(run[-1], thinks)]
        else:
            for n, message in enumerate(run, position):
                bare = n > 0 and bool(messages[n - 1].task)
                with_reasoning = thinks and n >= first_with_reasoning
                segments += _message(message, n, with_reasoning=with_reasoning, bare=bare)
                if n == 0 and message.role == "system":
                    segments += _sections(request)
                if message.calls:
                    call_order = _order_of(message)
        images += [image for message in run for image in message.content.images]
        position += len(run)
    return _finished(request, segments, tuple(images))


def _with_head_message(request: ChatRequest) -> tuple[ChatMessage, ...]:
    """Sections of the system message need one."""
    has_sections = request.offer is not None or bool(request.response_format)
    if has_sections and request.messages[0].role != "system":
        return (ChatMessage(role="system"), *request.messages)
    return request.messages


def _sections(request: ChatRequest) -> list[Segment]:
    tools = [Segment(JOINT), *request.offer.section()] if request.offer else []
    form = [Segment(JOINT), *request.response_format] if request.response_format else []
    return tools + form


def _head(messages: Sequence[ChatMessage], thinking: Thinking) -> Iterable[Segment]:
    yield from special(BOS)
    if thinking.enabled or messages[0].role == "system":
        yield from special(SYSTEM)
    if thinking.enabled:
        yield Segment(EFFORT_LINE.format(effort=thinking.effort))


def _asks(message: ChatMessage, position: int) -> bool:
    """Reasoning before such a message is old and left out."""
    return message.role in ("user", "tool") or (message.role == "system" and position > 0)


def _order_of(message: ChatMessage) -> dict[str, int]:
    order: dict[str, int] = {}
    for n, call in enumerate(message.calls):
        order.setdefault(call.call_id, n)
    return order


def _in_order(run: Sequence[ChatMessage], call_order: Mapping[str, int]) -> list[ChatMessage]:
    """Tool results by the order of their calls, on the places they hold; texts stay."""
    results = [message for message in run if message.role == "tool"]
    results.sort(key=lambda message: call_order.get(message.call_id, 0))
    ordered = iter(results)
    return [next(ordered) if message.role == "tool" else message for message in run]


def _turn(run: Sequence[ChatMessage]) -> list[Segment]:
    segments = special(USER)
    for n, message in enumerate(run):
        segments += [Segment(JOINT)] * (n > 0)
        body = message.content.segments()
        if message.role == "tool":
            body = [Segment("<tool_result>"), *body, Segment("</tool_result>")]
        segments += body
    return segments


def _task_header(last: ChatMessage, thinks: bool) -> list[Segment]:
    """What a task writes instead of the header of a reply."""
    if not last.task:
        return []
    token = special(f"<\uff5c{last.task}\uff5c>")
    if last.task == "action":
        return [*special(ASSISTANT, THINK if thinks else END_THINK), *token]
    return token


def _message(
    message: ChatMessage, position: int, *, with_reasoning: bool, bare: bool
) -> list[Segment]:
    content = message.content.segments()
    if message.role == "system":
        return content if position == 0 else [*special(SYSTEM), *content]
    if message.role == "latest_reminder":
        return [*special(LATEST_REMINDER), *content]
    segments: list[Segment] = []
    if not bare:
        segments = special(ASSISTANT)
        if with_reasoning:
            segments += [*special(THINK), Segment(message.reasoning)]
            if message.prefix and not message.content.text:
                return segments
        segments += special(END_THINK)
    segments += content
    segments += calls_block(message.calls) if message.calls else []
    return segments if message.prefix else segments + special(EOS)


def _finished(
    request: ChatRequest, segments: list[Segment], images: tuple[ImagePart, ...]
) -> ChatPrompt:
    """The prompt's end: a message to continue, a task, or the header of a reply."""
    last = request.messages[-1]
    thinks = request.thinking.enabled
    if last.prefix:
        is_bare = len(request.messages) > 1 and bool(request.messages[-2].task)
        opened = thinks and not last.content.text and not is_bare
        return ChatPrompt(
            segments=tuple(segments), in_reasoning=opened, continues=True, images=images
        )
    if last.task:
        opened = thinks and last.task == "action"
        return ChatPrompt(segments=tuple(segments), in_reasoning=opened, images=images)
    segments = [*segments, *special(ASSISTANT, THINK if thinks else END_THINK)]
    opening = tuple(request.offer.opening()) if request.offer else ()
    return ChatPrompt(
        segments=(*segments, *(() if thinks else opening)),
        in_reasoning=thinks,
        calls=_call_rules(request.offer, is_opened=bool(opening) and not thinks),
        forced=opening if thinks else (),
        images=images,
    )


def _call_rules(offer: ToolOffer | None, *, is_opened: bool) -> CallRules | None:
    if offer is None:
        return None
    return CallRules(
        schemas={tool.name: tool.parameters for tool in offer.tools},
        parallel=offer.parallel,
        opened=is_opened,
        called=offer.name if is_opened else "",
    )
