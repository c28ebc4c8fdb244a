"""What the generated tasks share: random numbers of a case, the switch of thinking, numbers read.

Not a task. Read next: `sums.py`.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Servers read the one or the other name, ours reads both, and most ignore what they do not know.
THINKING: Mapping[str, Any] = {
    "chat_template_kwargs": {"thinking": True, "enable_thinking": True},
}
PLAIN: Mapping[str, Any] = {
    "chat_template_kwargs": {"thinking": False, "enable_thinking": False},
}

# A sign is one only where no number or word stands before it: "40-15" has no negative number.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-\u2212])?\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def case_random(name: str, seed: int, index: int) -> random.Random:
    """Random numbers of one case, whatever the number of cases and the process."""
    return random.Random(f"{name}/{seed}/{index}")


def last_number(text: str) -> float | None:
    """The last number of a text; "1,024" and "1024" are the same."""
    found = _NUMBER.findall(_THOUSANDS.sub("", text))
    return float(found[-1].replace("\u2212", "-")) if found else None


def listed(items: Sequence[str]) -> str:
    """One, two and three."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def made_up(r: random.Random, words: Sequence[str], *, num_parts: int = 3) -> str:
    """A word that means nothing, out of syllables."""
    return "".join(r.choice(words) for _ in range(num_parts))


def plural(thing: str) -> str:
    """Several of a thing."""
    if thing.endswith(("knife", "shelf")):
        return thing.removesuffix("fe").removesuffix("f") + "ves"
    return thing + ("es" if thing.endswith(("x", "s", "sh", "ch")) else "s")


def with_article(noun: str) -> str:
    """A thing."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"
