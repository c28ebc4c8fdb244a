"""Prompts to ids and ids to text: pure, incremental state machines. No torch, no HTTP."""
