"""The grammar library as both processes use it: its view of a tokenizer, its limits, its errors.

The only place that knows llguidance's ways: errors do not raise, messages have several lines, and
texts that look like special tokens must not become them. Read next: `grammar_check.py` (the
server), `engine/grammar.py`.
"""

import re
from typing import Any

import llguidance
import numpy as np

from twinspark.errors import FormatError, RequestError
from twinspark.text.tokenizer import Tokenizer

# Per mask: 200,000 units of work of the lexer are about 14 ms, the usual limit. Larger grammars
# than a million symbols and sets of 2,000 items are refused by the library in any case.
STEP_FUEL = 200_000
MAX_LEXER_STATES = 100_000
MAX_MESSAGE = 300
_EXCERPT = re.compile(
    r"\d+ \||[|^<]"
)  # lines that show the grammar, which is not the client's text
_OF_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")
_TOKEN_NAMES = re.compile(r"[\s;,.]*(the )?(following )?special tokens are available:.*|⟦[^⟧]*⟧?")
WALK_TOKENS = 8


def library_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> Any:
    """The vocabulary as the library knows it. About a second for 129,280 ids.

    Args:
        tokenizer: of the pack.
        vocab_size: ids that the model has, at least as many as the tokenizer.

    Raises:
        FormatError: the library reads other bytes out of the tokenizer than we do.
    """
    size = max(vocab_size, tokenizer.vocab_size)
    built = unchecked_tokenizer(tokenizer.closed_json(), size, tokenizer.eos_id)
    specials = set(tokenizer.specials.values())
    for token_id in range(tokenizer.vocab_size):
        ours = tokenizer.token_bytes(token_id)
        if token_id in specials:
            is_same = built.is_special_token(token_id)
        else:  # no text has the byte FF, which marks special tokens there
            is_same = built.decode_bytes([token_id]) == ours or ours.startswith(b"\xff")
        if not is_same:
            raise FormatError(
                f"tokenizer.json: the grammar library reads token {token_id} in another way"
            )
    return built


def unchecked_tokenizer(closed_json: str, vocab_size: int, eos_id: int) -> Any:
    """The same from its parts, where masks decide about nothing but errors."""
    return llguidance.LLTokenizer(closed_json, n_vocab=vocab_size, eos_token=eos_id)


def library_matcher(tokenizer: Any, grammar: str) -> Any:
    """A grammar at its start, ready to be copied.

    Args:
        tokenizer: of `library_tokenizer`.
        grammar: its text.

    Raises:
        RequestError: it does not compile, or nothing follows it.
    """
    limits = llguidance.LLParserLimits(
        step_lexer_fuel=STEP_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    fault = fault_of(matcher)
    if not fault:
        matcher.compute_bitmask()
        fault = fault_of(matcher)
    if fault:
        raise RequestError(fault, code="grammar")
    return matcher


def fault_of(matcher: Any) -> str:
    """What is wrong with a matcher, in one short line; empty if nothing is."""
    if not matcher.is_error():
        return ""
    lines = [line.strip() for line in str(matcher.get_error()).splitlines()]
    text = " ".join(line for line in lines if line and not _EXCERPT.match(line))
    text = _TOKEN_NAMES.sub("", _OF_SCHEMA.sub("", text))  # names that nobody is to know
    if "NoExtension" in text:
        return "nothing can follow it"
    return text[:MAX_MESSAGE] or "the grammar library gives no reason"


def walk(matcher: Any) -> None:
    """Go a few tokens along a grammar, for what only shows on the way.

    Raises:
        RequestError: it cannot be followed there.
    """
    matcher = matcher.deep_copy()
    for _ in range(WALK_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        fault = fault_of(matcher)
        if fault:
            raise RequestError(fault, code="grammar")
        ids = np.flatnonzero(bits)
        if matcher.is_stopped() or not len(ids):
            return
        matcher.consume_token(int(ids[len(ids) // 2]))
