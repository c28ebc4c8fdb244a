"""Reasoning of recent replies, for clients that do not send it back.

With tools every turn's reasoning is part of the prompt. A client that drops it would hide the
model's plan from it, and the prompt would no longer be a prefix of what was computed. For one
thread. Read next: `template.py`, between whose two halves it stands.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from twinspark.text.conversation import ChatMessage
from twinspark.text.template import ChatRequest

Key = tuple[str, str, str]  # scope, kind, id or digest


class ReasoningMemory:
    """The newest replies, within a number of entries and of characters."""

    def __init__(self, *, max_entries: int = 1024, max_characters: int = 32 << 20) -> None:
        """Start empty.

        Args:
            max_entries: a reply takes one, or one for each of its tool calls.
            max_characters: of reasoning, all entries together.
        """
        self._max_entries = max_entries
        self._max_characters = max_characters
        self._entries: OrderedDict[Key, str] = OrderedDict()
        self._num_characters = 0

    def __len__(self) -> int:
        return len(self._entries)

    def remember(
        self,
        request: ChatRequest,
        *,
        reasoning: str,
        content: str,
        call_ids: Sequence[str] = (),
        scope: str = "",
    ) -> None:
        """Keep the reasoning of a reply.

        Args:
            request: what was answered.
            reasoning: its thinking block; an empty one is not kept.
            content: its text.
            call_ids: of its tool calls, as the client got them.
            scope: only requests of this scope find it, such as those of one API key.
        """
        if not reasoning or len(reasoning) > self._max_characters:
            return
        question = _question(request.messages, len(request.messages))
        for key in _keys(scope, question, content, call_ids):
            self._num_characters += len(reasoning) - len(self._entries.pop(key, ""))
            self._entries[key] = reasoning
        self._forget()

    def restore(self, request: ChatRequest, *, scope: str = "") -> ChatRequest:
        """The request with the reasoning that its earlier replies leave out, where it is known.

        A message that says its reasoning was empty is left as it is.
        """
        messages, restored = list(request.messages), 0
        for n, message in enumerate(messages):
            if message.role != "assistant" or message.has_reasoning or message.prefix:
                continue
            call_ids = [call.call_id for call in message.calls if call.call_id]
            keys = _keys(scope, _question(messages, n), message.content.text, call_ids)
            found = next((key for key in keys if key in self._entries), None)
            if found is not None:
                self._entries.move_to_end(found)
                messages[n] = replace(message, reasoning=self._entries[found])
                restored += 1
        if not restored:
            return request
        return replace(request, messages=tuple(messages), restored=restored)

    def _forget(self) -> None:
        while len(self._entries) > self._max_entries or self._num_characters > self._max_characters:
            _, reasoning = self._entries.popitem(last=False)
            self._num_characters -= len(reasoning)


def _keys(scope: str, question: str, content: str, call_ids: Sequence[str]) -> list[Key]:
    """A call's id is unique; a text is not, so it counts only as the answer to its question."""
    if call_ids:
        return [(scope, "call", call_id) for call_id in call_ids]
    digest = hashlib.sha256(f"{len(question)}:{question}{content.strip()}".encode()).hexdigest()
    return [(scope, "text", digest)]


def _question(messages: Sequence[ChatMessage], end: int) -> str:
    """What came after the last reply before a place: the turn that the next one answers."""
    before = (messages[n] for n in range(end - 1, -1, -1))
    turn = takewhile(lambda message: message.role != "assistant", before)
    return "\0".join(message.content.text for message in turn)
