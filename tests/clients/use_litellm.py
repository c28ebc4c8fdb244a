"""litellm: a whole reply, a streamed one, and a tool loop."""

import json
import os

import litellm

NUMBER = {"type": "integer"}
PARAMETERS = {
    "type": "object", "required": ["a", "b"], "properties": {"a": NUMBER, "b": NUMBER},
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS},
    }
]
COMMON = {"model": "openai/tiny", "api_base": os.environ["BASE_URL"], "api_key": "none"}
messages = [{"role": "user", "content": "What is two and three?"}]

reply = litellm.completion(**COMMON, messages=messages)
assert reply.choices[0].message.content == "The answer is five.", reply
assert reply.choices[0].message.reasoning_content == "Let me think."
assert reply.usage.completion_tokens_details.reasoning_tokens > 0

chunks = list(litellm.completion(**COMMON, messages=messages, stream=True,
                                 stream_options={"include_usage": True}))  # fmt: skip
built = litellm.stream_chunk_builder(chunks, messages=messages)
assert built.choices[0].message.content == "The answer is five.", built
assert built.usage.prompt_tokens == reply.usage.prompt_tokens

for stream in (False, True):
    asked = litellm.completion(**COMMON, messages=messages, tools=TOOLS, stream=stream)
    if stream:
        asked = litellm.stream_chunk_builder(list(asked), messages=messages)
    message = asked.choices[0].message
    assert asked.choices[0].finish_reason == "tool_calls", asked
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}
    last = litellm.completion(**COMMON, messages=[*messages, message, result], tools=TOOLS)
    assert last.choices[0].message.content == "The answer is five.", last

text = litellm.text_completion(
    **{**COMMON, "model": "text-completion-openai/tiny"}, prompt="Two and three:", max_tokens=50
)
assert text.choices[0].text == "The answer is five.", text
print("ok")
