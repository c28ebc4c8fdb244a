"""Chat messages to prompt: which special tokens stand where, and what is client text.

Prompt format 3, 4, 5 (plain chat and thinking), 9 (continuation) and 11 (client text can never
become a special token). Checked messages come from `conversation.py`. Tools, response formats,
tasks and images are refused there; their sections will be further segments here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from twinspark.text.conversation import ChatMessage, read_messages, refuse_unsupported
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

EFFORT_LINE = (
    "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)
JOINT = "\n\n"


@dataclass(frozen=True)
class Segment:
    """A part of a prompt: one special token by its text, or plain text."""

    text: str
    special: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered chat request.

    Attributes:
        segments: in order; plain ones may be adjacent.
        in_reasoning: the reply starts inside a thinking block.
        continues: the prompt ends with the client's own start of the reply.
    """

    segments: tuple[Segment, ...]
    in_reasoning: bool
    continues: bool = False

    @property
    def text(self) -> str:
        """The prompt as text. For reading only: encoding it again would not be safe."""
        return "".join(segment.text for segment in self.segments)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's ids, at least one."""
        return encode_segments(tokenizer, self.segments)


def render_request(request: Mapping[str, Any], *, default: Thinking | None = None) -> ChatPrompt:
    """Render the body of a chat completion request.

    Args:
        request: the JSON body; only the fields that shape the prompt are read.
        default: thinking and effort where the request says nothing.

    Raises:
        RequestError: a field is wrong or not supported yet; `param` names it.
    """
    refuse_unsupported(request)
    messages = read_messages(request)
    return render_chat(messages, resolve_thinking(request, default=default))


def render_chat(messages: Sequence[ChatMessage], thinking: Thinking) -> ChatPrompt:
    """Render checked messages."""
    segments = list(_head(messages, thinking))
    last_question = max((n for n, message in enumerate(messages) if _asks(message, n)), default=-1)
    position = 0
    for is_user, group in groupby(messages, lambda message: message.role == "user"):
        run = list(group)
        if is_user:
            segments += _user_turn(run)
        else:
            for n, message in enumerate(run, position):
                with_reasoning = thinking.enabled and n > last_question
                segments += _message(message, n, with_reasoning=with_reasoning)
        position += len(run)
    last = messages[-1]
    if last.prefix:
        opened = thinking.enabled and not last.content
        return ChatPrompt(segments=tuple(segments), in_reasoning=opened, continues=True)
    segments += _special(ASSISTANT, THINK if thinking.enabled else END_THINK)
    return ChatPrompt(segments=tuple(segments), in_reasoning=thinking.enabled)


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Ids of a prompt: specials by name, runs of plain segments as one text of the base BPE."""
    ids: list[int] = []
    for special, group in groupby(segments, lambda segment: segment.special):
        if special:
            ids += [tokenizer.specials[segment.text] for segment in group]
        else:
            text = "".join(segment.text for segment in group)
            ids += tokenizer.encode_plain(text) if text else ()
    return ids


def _special(*texts: str) -> list[Segment]:
    return [Segment(text, special=True) for text in texts]


def _head(messages: Sequence[ChatMessage], thinking: Thinking) -> Iterable[Segment]:
    yield from _special(BOS)
    if thinking.enabled or messages[0].role == "system":
        yield from _special(SYSTEM)
    if thinking.enabled:
        yield Segment(EFFORT_LINE.format(effort=thinking.effort))


def _asks(message: ChatMessage, position: int) -> bool:
    """Reasoning before such a message is old and left out."""
    return message.role == "user" or (message.role == "system" and position > 0)


def _user_turn(run: Sequence[ChatMessage]) -> list[Segment]:
    return [*_special(USER), Segment(JOINT.join(message.content for message in run))]


def _message(message: ChatMessage, position: int, *, with_reasoning: bool) -> list[Segment]:
    content = Segment(message.content)
    if message.role == "system":
        return [content] if position == 0 else [*_special(SYSTEM), content]
    if message.role == "latest_reminder":
        return [*_special(LATEST_REMINDER), content]
    segments = _special(ASSISTANT)
    if with_reasoning:
        segments += [*_special(THINK), Segment(message.reasoning)]
        if message.prefix and not message.content:
            return segments
    segments += [*_special(END_THINK), content]
    return segments if message.prefix else segments + _special(EOS)
