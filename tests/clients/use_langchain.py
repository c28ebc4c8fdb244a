"""langchain-openai: streaming, a bound tool, and structured output where it is served."""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


COMMON = {"model": "tiny", "base_url": os.environ["BASE_URL"], "api_key": "none"}
chat = ChatOpenAI(**COMMON, stream_usage=True)
messages = [HumanMessage("What is two and three?")]
assert chat.invoke(messages).content == "The answer is five."
pieces = list(chat.stream(messages))
assert "".join(piece.content for piece in pieces) == "The answer is five."
assert sum(p.usage_metadata["output_tokens"] for p in pieces if p.usage_metadata) > 0

bound = chat.bind_tools([add])
for ask in (bound.invoke, lambda m: sum(list(bound.stream(m))[1:], list(bound.stream(m))[0])):
    reply = ask(messages)
    (call,) = reply.tool_calls
    assert call["args"] == {"a": 2, "b": 3}, reply
    result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
    assert bound.invoke([*messages, reply, result]).content == "The answer is five."

scored = chat.bind(logprobs=True, top_logprobs=2).invoke(messages)
assert scored.response_metadata["logprobs"]["content"]
assert OpenAI(**COMMON, max_tokens=50).invoke("Two and three:") == "The answer is five."
print("ok")
