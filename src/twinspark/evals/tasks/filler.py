"""Sentences about nothing in particular: the text around needles, as long as it is asked for.

Owns the sentences and their fitting to a number of tokens. Read next: `needle.py`.
"""

import random
from collections.abc import Iterator

from twinspark.errors import RequestError
from twinspark.evals.case import NOT_MEASURABLE, CountTokens
from twinspark.evals.tasks import words
from twinspark.evals.tasks.draw import plural, with_article

_SENTENCES = (
    "The {adj} {animal} {did} {a_thing} near the {place} {time}.",
    "{name} {did} the {adj} {thing} and {adverb} walked to the {place}.",
    "{name} and {other} {did} {a_thing} {time}.",
    "Nobody in {city} {did} the {thing} that {name} had left in the {place}.",
    "There was {a_adj} {thing} on the {other_thing}, but {name} {adverb} looked at it.",
    "{time_cap} the {animal} slept beside the {adj} {place}.",
    "The {job} of {city} {adverb} {did} {food} and {other_food}.",
    "{name} likes {hobby}, while {other} likes {other_hobby}.",
    "In {city} the {place} is {color}, and the {other_place} behind it is {other_color}.",
    "A {job} told {name} about the {adj} {place} in {city}.",
    "On {weekday} {name} {did} {number} {color} {things}.",
    "It took {name} {number} days to travel from {city} to {other_city}.",
    "The {thing} was made of {material}, so it was {adj} and {other_adj}.",
    "When the {animal} saw the {other_animal}, it {adverb} ran behind the {place}.",
    "{other} asked whether the {job} had {did} the {thing}.",
    "In {month} the {adj} {place} smelled of {food}.",
    "Every {weekday} the {job} {did} {a_thing} and drank {number} cups of tea.",
    "{name} said that {hobby} was harder than {other_hobby}, and {other} agreed.",
    "The road to the {place} was {adj}, and {animals} {adverb} crossed it.",
    "{number} {animals} lived under the {adj} {place} until {month}.",
    "Why {name} {did} the {color} {thing} {time} is still a question.",
    "A letter from {city} lay on the {thing}; {name} {adverb} {did} it.",
    "The {place} of {city} is older than the {other_place}, says {name}.",
    "{name} packed {food}, {other_food} and {a_thing}, then left for {other_city}.",
)
_SHORT = (
    "It rained.", "Yes.", "No.", "So it went.", "Nothing moved.", "All was well.", "Time passed.",
    "The wind was cold.", "Nobody spoke.", "It was late.", "The light was good.", "Birds sang.",
)  # fmt: skip
_TRIES = 200
LEAST_SHARE = 8  # pieces with an eighth of the mean's tokens are not counted by their length


def pieces(r: random.Random) -> Iterator[str]:
    """Endless sentences in paragraphs; each but the first begins with the blanks before it."""
    blank = ""
    while True:
        for _ in range(r.randint(3, 7)):
            yield blank + sentence(r)
            blank = " "
        blank = "\n\n"


def sentence(r: random.Random) -> str:
    """One sentence."""
    name, other = r.sample(words.NAMES, 2)
    city, other_city = r.sample(words.CITIES, 2)
    adj, other_adj = r.sample(words.ADJECTIVES, 2)
    thing, other_thing = r.choice(words.THINGS), r.choice(words.THINGS)
    animal = r.choice(words.ANIMALS)
    time = r.choice(words.TIMES)
    return r.choice(_SENTENCES).format(
        name=name,
        other=other,
        city=city,
        other_city=other_city,
        adj=adj,
        other_adj=other_adj,
        a_adj=with_article(adj),
        thing=thing,
        things=plural(thing),
        other_thing=other_thing,
        a_thing=with_article(thing),
        animal=animal,
        animals=plural(animal),
        other_animal=r.choice(words.ANIMALS),
        place=r.choice(words.PLACES),
        other_place=r.choice(words.PLACES),
        color=r.choice(words.COLORS),
        other_color=r.choice(words.COLORS),
        food=r.choice(words.FOODS),
        other_food=r.choice(words.FOODS),
        hobby=r.choice(words.HOBBIES),
        other_hobby=r.choice(words.HOBBIES),
        job=r.choice(words.JOBS),
        material=r.choice(words.MATERIALS),
        weekday=r.choice(words.WEEKDAYS),
        month=r.choice(words.MONTHS),
        did=r.choice(words.VERBS_PAST),
        adverb=r.choice(words.ADVERBS),
        number=r.randint(2, 60),
        time=time,
        time_cap=time[0].upper() + time[1:] + ",",
    )


def fitted(r: random.Random, num_tokens: int, slack: int, count_tokens: CountTokens) -> list[str]:
    """Pieces that together have at most `num_tokens` tokens, and at most `slack` fewer.

    Counts only what is added or taken away, many pieces at a time, so where a token covers the end
    of one and the start of the next the result is a little shorter than it says.

    Raises:
        RequestError: no text fits: there is no room for a sentence, tokens are not counted as
            texts grow, or the slack is below the shortest sentence.
    """
    endless = pieces(r)
    found = [next(endless) for _ in range(20)]
    total = count_tokens("".join(found))
    per_piece = max(total, 1) / len(found)
    if num_tokens < per_piece:
        raise RequestError(
            f"no text has {num_tokens} tokens, a sentence has about {per_piece:.0f}",
            code=NOT_MEASURABLE,
        )
    for _ in range(_TRIES):
        if 0 <= num_tokens - total <= 4 * per_piece:
            break
        step = int(abs(num_tokens - total) / per_piece) + 1
        if total < num_tokens:
            more = [next(endless) for _ in range(step)]
            found += more
            size = count_tokens("".join(more))
            total += size
        else:
            size = count_tokens("".join(found[-step:]))
            del found[-step:]
            total -= size
        if size * LEAST_SHARE < step * per_piece or total < 0:
            raise _miscounted(num_tokens)
    else:
        raise _miscounted(num_tokens)
    for _ in range(_TRIES):
        missing = num_tokens - total
        if missing <= slack and found:
            return found
        text = sentence(r) if missing > 2 * per_piece else r.choice(_SHORT)
        size = count_tokens(f" {text}")
        if size <= missing:
            found.append(f" {text}")
            total += size
    raise _miscounted(num_tokens)


def _miscounted(num_tokens: int) -> RequestError:
    return RequestError(
        f"no text comes near {num_tokens} tokens, whatever is added or taken away: is the count of "
        "tokens right?",
        code=NOT_MEASURABLE,
    )
