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


def switch(*, thinks: bool) -> Mapping[str, Any]:
    """Fields of a request that is to think, or not."""
    return THINKING if thinks else PLAIN


def ideal_message(
    content: str, reasoning: str, *, thinks: bool, calls: Sequence[Mapping[str, Any]] = ()
) -> Mapping[str, Any]:
    """An assistant's message; the reasoning is left out where it does not think."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinks:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def case_random(name: str, seed: int, index: int) -> random.Random:
    """Random numbers of one case, whatever the number of cases and the process."""
    return random.Random(f"{name}/{seed}/{index}")


def numbers_in(text: str) -> list[float]:
    """The numbers of a text, in order; "1,024" and "1024" are the same."""
    found = _NUMBER.findall(without_thousands(text))
    return [float(number.replace("\u2212", "-")) for number in found]


def last_number(text: str) -> float | None:
    """The last number of a text."""
    found = numbers_in(text)
    return found[-1] if found else None


def without_thousands(text: str) -> str:
    """A text whose numbers have no commas in them."""
    return _THOUSANDS.sub("", text)


def stands_in(value: str, text: str) -> bool:
    """Whether a word or several stand in a text as they are, but for capitals."""
    found = re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", text.casefold())
    return found is not None


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
