"""Whole choices out of the parts of a `Generation`, for replies that are not streamed.

Read next: `generation.py` (the parts), `chat.py` (one dialect's wire form).
"""

from contextlib import aclosing

from twinspark.messages import TokenScore
from twinspark.server.generation import Ended, Generation, Part, PromptScored, TextDelta


async def collected(generation: Generation) -> list["Choice"]:
    """Run to the end: every choice as a whole, in order.

    Raises:
        ApiError: the engine failed a request.
    """
    choices = [Choice(n) for n in range(len(generation.prepared.requests))]
    async with aclosing(generation.run()) as parts:
        async for part in parts:
            choices[part.choice].take(part)
    return choices


class Choice:
    """A whole choice.

    Attributes:
        index: which one.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.scores: list[TokenScore] = []
        self.prompt_scores: list[TokenScore] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._ended: Ended | None = None

    def take(self, part: Part) -> None:
        """Add a part."""
        if isinstance(part, TextDelta):
            self._reasoning.append(part.reasoning)
            self._content.append(part.content)
            self.scores += part.scores
            for call in part.calls:
                if call.name is not None:
                    self._calls.append((call.call_id, call.name, []))
                self._calls[call.index][2].append(call.arguments)
        elif isinstance(part, PromptScored):
            self.prompt_scores += part.scores
        elif isinstance(part, Ended):
            self._ended = part

    @property
    def reasoning(self) -> str:
        """Text of the thinking block."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """Text of the answer."""
        return "".join(self._content)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Id, name and arguments of each tool call."""
        return [(call_id, name, "".join(parts)) for call_id, name, parts in self._calls]

    @property
    def ended(self) -> Ended:
        """How it ended. Only after its last part."""
        assert self._ended is not None
        return self._ended
