"""What the scripted engine answers clients: calls a tool where one is offered, then sums up.

A brain reads only the prompt, as a model does. It thinks first, calls the first tool that it knows
with arguments that fit, and answers in words once the tool's result is there.
"""

import json
from collections.abc import Iterator

from tests.cases.api import block, call, value
from tests.scripted_engine import ScriptedEngine, Step

from twinspark.messages import GenerateRequest
from twinspark.text.tokenizer import ASSISTANT, USER

ANSWER = "The answer is five."
MADE_FILE, MADE_TEXT = "made.txt", "made by a call"
COMMAND = f"printf '%s' '{MADE_TEXT}' > {MADE_FILE}"
# Tool -> its arguments: name, text, whether it is a string.
CALLS = {
    "bash": (("command", COMMAND, "true"), ("description", "Makes a file", "true")),
    "exec_command": (("cmd", COMMAND, "true"),),
    "add": (("a", "2", "false"), ("b", "3", "false")),
}
OBJECT = {"city": "Oslo", "degrees": 5}


class Brain:
    """Answers for one engine.

    Attributes:
        num_calls: tool calls it has made.
        num_results: turns in which it has seen a tool's result.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self.num_calls = self.num_results = 0
        self._engine = engine
        engine.answer(self._rounds)

    def _rounds(self, request: GenerateRequest) -> Iterator[Step]:
        text = self._engine.tokenizer.decode(list(request.prompt_ids))
        if request.in_reasoning:
            yield from ["Let me ", "think.", "</think>"]
        if request.form is not None:
            yield from self._in_pieces(json.dumps(OBJECT))
            return
        name = self._tool(request, text)
        turn = text.rsplit(USER, 1)[-1] if USER in text else text
        if "<tool_result>" in turn:
            self.num_results += 1
        elif name is not None:
            self.num_calls += 1
            yield "I will use a tool.\n\n"
            yield from self._in_pieces(block(call(*(value(*v) for v in CALLS[name]), name=name)))
            return
        yield from self._in_pieces(ANSWER)

    def _tool(self, request: GenerateRequest, text: str) -> str | None:
        if request.calls is None:
            return None
        head = text.split(ASSISTANT, 1)[0]
        return next((name for name in CALLS if f'{{"name": "{name}"' in head), None)

    def _in_pieces(self, text: str) -> Iterator[list[int]]:
        ids = self._engine.ids(text)
        yield from (ids[at : at + 3] for at in range(0, len(ids), 3))
