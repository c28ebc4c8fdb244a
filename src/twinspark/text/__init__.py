"""Prompts to ids and ids to text: pure, incremental state machines. No torch, no HTTP.

Forward: `template.py` (request to prompt), `conversation.py` (its messages), `thinking.py`
(effort), `tokenizer.py` (ids). Back: `reply.py` (one reply), `reasoning.py` (its sections),
`stops.py` (stop strings), `detokenize.py` (ids to characters).
"""
