"""The Engram token map: ids whose texts normalize to the same key share a compressed id.

Built once from a tokenizer's texts (model specification 3.9); who reads the tokenizer, and where
the result is cached, is decided elsewhere. Standard library only. Read next: `engram.py`.
"""

import re
import unicodedata
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_REPLACEMENT = "\ufffd"
_ONE_SPACE = "\ue000"
_SPACES = re.compile(r"[ \t\r\n]+")
# Unicode White_Space; str.strip() would also take U+001C..U+001F, which are not in it
_WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)


def token_key(text: str, raw_token: str) -> str:
    """The key of one token.

    Args:
        text: the id decoded alone, special tokens kept, no clean-up.
        raw_token: the token as the vocabulary spells it, used when its bytes are no text.
    """
    if _REPLACEMENT in text:
        return raw_token
    key = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    key = "".join(c for c in key if not unicodedata.category(c).startswith("M"))
    # character by character: str.lower() would write a final sigma by context
    key = "".join(c.lower() for c in key)
    key = _SPACES.sub(" ", key)
    if key == " ":
        key = _ONE_SPACE
    key = key.strip(_WHITE_SPACE).replace(_ONE_SPACE, " ")
    return key or text


def build_token_map(texts: Iterable[tuple[str, str]]) -> npt.NDArray[np.int32]:
    """Compressed ids of all tokens, numbered in order of first appearance.

    Args:
        texts: for each id in order (its text decoded alone, its raw token), as in `token_key`.

    Returns:
        int32 [number of ids].
    """
    seen: dict[str, int] = {}
    ids = [seen.setdefault(token_key(text, raw), len(seen)) for text, raw in texts]
    return np.array(ids, np.int32)
