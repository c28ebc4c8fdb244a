"""The Engram token map: normalization chain, numbering, and the real tokenizer's 99092 keys."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from twinspark.kernels.token_map import build_token_map, token_key


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "hello"),
        (" Hello", "hello"),  # stripped
        ("\u00c9tude", "etude"),  # accents go, base letters stay
        ("e\u0301", "e"),
        ("\uff21", "a"),  # NFKC: full-width A
        ("\ufb01", "fi"),  # NFKC: a ligature
        (" ", " "),  # exactly one space is kept
        ("   ", " "),  # runs become one space first
        ("\n", " "),
        ("\t \r\n", " "),
        ("\u00a0", " "),  # NFKC turns the no-break space into a space
        ("a \n b", "a b"),
        ("\u0301", "\u0301"),  # nothing left: the text itself
        ("\u2003x", "x"),
        ("\x1f", "\x1f"),  # no Unicode white space, though str.strip would take it
        ("\u03a3\u03a3", "\u03c3\u03c3"),  # no final sigma
        ("\u0130", "i"),
    ],
)
def test_chain(text: str, expected: str) -> None:
    assert token_key(text, "raw") == expected


def test_bytes_that_are_no_text_keep_their_raw_token() -> None:
    assert token_key("\ufffd", "\u00e2\u0122") == "\u00e2\u0122"


def test_numbered_by_first_appearance() -> None:
    texts = [("B", "B"), ("a", "a"), (" b", "Gb"), ("A", "A"), ("c", "c")]
    got = build_token_map(texts)
    assert got.dtype == np.int32 and got.tolist() == [0, 1, 0, 1, 2]


def test_99092_keys_of_the_real_tokenizer(real_tokenizer_path: Path) -> None:
    """Model specification 3.9: exactly this many, else every multiplier differs."""
    tokenizer = Tokenizer.from_str(real_tokenizer_path.read_text("utf-8"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    assert size == 129280
    raw = [tokenizer.id_to_token(i) for i in range(size)]
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    got = build_token_map(zip(texts, raw, strict=True))
    assert len(np.unique(got)) == 99092 == got.max() + 1
    specials = json.loads(real_tokenizer_path.read_text("utf-8"))["added_tokens"]
    assert len({int(got[t["id"]]) for t in specials}) > 1
