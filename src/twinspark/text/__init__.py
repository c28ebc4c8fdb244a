"""Prompts to ids and ids to text: pure, incremental state machines. No torch, no HTTP.

Forward: `template.py` (request to prompt), `conversation.py` (its messages), `history.py` (their
tool calls), `tools.py`, `formats.py`, `thinking.py`, `completion.py`, `memory.py`, `tokenizer.py`.
Forms: `grammar.py` (fields to a grammar), `grammar_json.py`, `grammar_calls.py`,
`grammar_values.py`, `grammar_library.py` (llguidance itself).
Back: `reply.py` (one reply), `reader.py` and `reasoning.py` (its sections), `tool_calls.py`,
`stops.py`, `detokenize.py`.
"""
