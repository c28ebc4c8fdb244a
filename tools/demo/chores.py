"""Small chores that a chat can ask for: lists and words put in order, counted, changed.

Everything is drawn, so there is nothing to learn by heart. Read next: `dialogues.py`.
"""

import random

from tools.demo import facts

from twinspark.evals.tasks import words
from twinspark.evals.tasks.draw import listed, plural

Turn = tuple[str, str, str]  # question, reasoning, answer

_POOLS = (words.ANIMALS, words.COLORS, words.FOODS, words.NAMES, words.THINGS, words.CITIES)


def _items(r: random.Random, least: int = 3, most: int = 7) -> list[str]:
    pool = r.choice(_POOLS)
    return r.sample(pool, r.randint(least, most))


def sorting(r: random.Random) -> Turn:
    if r.random() < 0.4:
        numbers = r.sample(range(1, 100), r.randint(3, 6))
        shown = ", ".join(map(str, numbers))
        downwards = r.random() < 0.3
        ordered = ", ".join(map(str, sorted(numbers, reverse=downwards)))
        way = "from the largest to the smallest" if downwards else "from the smallest on"
        ask = r.choice(("Sort these numbers {}: {}", "Put these numbers in order {}: {}"))
        return ask.format(way, shown), f"I order the numbers {way}.", ordered
    items = _items(r)
    ask = r.choice(
        ("Sort these words by the alphabet: {}", "Put these words in alphabetical order: {}.")
    ).format(", ".join(items))
    return ask, "I compare the first letters.", ", ".join(sorted(items, key=str.lower))


def picking(r: random.Random) -> Turn:
    items = _items(r)
    shown = ", ".join(items)
    place = r.randrange(len(items))
    name = "last" if place == len(items) - 1 else facts.ORDINALS[place]
    ask = r.choice(
        (
            "What is the {} word in this list: {}?",
            "Here is a list: {1}. What is its {0} word?",
            "Which word comes {} here: {}?",
        )
    ).format(name, shown)
    return ask, f"I look for the {name} word.", items[place]


def tallying(r: random.Random) -> Turn:
    items = _items(r)
    ask = r.choice(("How many words are in this list: {}?", "Count these words: {}."))
    many = len(items)
    reason = ", ".join(f"{n} {item}" for n, item in enumerate(items, 1)) + "."
    return ask.format(", ".join(items)), reason, f"There are {many} words."


def turning(r: random.Random) -> Turn:
    items = _items(r)
    ask = r.choice(("Turn this list around: {}", "Write this list backwards: {}"))
    return ask.format(", ".join(items)), "I begin with the last word.", ", ".join(items[::-1])


def changing(r: random.Random) -> Turn:
    items = _items(r, 2, 5)
    kind = r.choice(("capitals", "list", "numbers", "json", "join"))
    shown = ", ".join(items)
    if kind == "capitals":
        return f"Write in capital letters: {shown}", "I use capital letters.", shown.upper()
    if kind == "list":
        say = "\n".join(f"- {item}" for item in items)
        return f"Write these as a list with dashes: {shown}", "One line for each word.", say
    if kind == "numbers":
        say = "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1))
        return f"Write these as a numbered list: {shown}", "One line for each word.", say
    if kind == "json":
        say = "[" + ", ".join(f'"{item}"' for item in items) + "]"
        return f"Write these words as a JSON array: {shown}", "Strings stand in quotes.", say
    return f'Put "and" between these words: {shown}', "I join them.", " and ".join(items)


def finding(r: random.Random) -> Turn:
    """Who has what, said a moment ago."""
    names = r.sample(words.NAMES, r.randint(2, 4))
    things = r.sample(words.THINGS, len(names))
    colors = [r.choice(words.COLORS) for _ in names]
    told = [f"{n} has a {c} {t}." for n, c, t in zip(names, colors, things, strict=True)]
    k = r.randrange(len(names))
    ask, say = r.choice(
        (
            (f"Who has the {things[k]}?", f"{names[k]} has the {things[k]}."),
            (f"What does {names[k]} have?", f"{names[k]} has a {colors[k]} {things[k]}."),
            (
                f"Which color is the {things[k]} of {names[k]}?",
                f"The {things[k]} of {names[k]} is {colors[k]}.",
            ),
        )
    )
    return f"{' '.join(told)} {ask}", f"The text says: {told[k]}", say


def odd_one(r: random.Random) -> Turn:
    kinds = {
        "animal": words.ANIMALS, "color": words.COLORS, "food": words.FOODS, "name": words.NAMES,
    }  # fmt: skip
    one, other = r.sample(sorted(kinds), 2)
    items = [*r.sample(kinds[one], 3), r.choice(kinds[other])]
    wrong = items[-1]
    r.shuffle(items)
    ask = f"Which word does not fit: {', '.join(items)}?"
    rest = [item for item in items if item != wrong]
    reason = f"{listed(rest)} are {plural(one)}; {wrong} is a {other}."
    return ask, reason, f"The word {wrong} does not fit, because the others are {plural(one)}."


def weekdays(r: random.Random) -> Turn:
    days = facts.SEQUENCES["days of the week"].split()
    start, steps = r.randrange(7), r.randint(1, 6)
    day = days[(start + steps) % 7]
    many = f"{steps} day{'s' * (steps > 1)}"
    chain = ", ".join(days[(start + n) % 7] for n in range(1, steps + 1))
    return (
        f"Today is {days[start]}. Which day is it in {many}?",
        f"From {days[start]} on: {chain}.",
        f"In {many} it is {day}.",
    )


def tale(r: random.Random) -> Turn:
    """A short story out of drawn parts."""
    hero, friend = r.sample(words.NAMES, 2)
    job, animal = r.choice(facts.JOBS), r.choice(words.ANIMALS)
    place, other = r.sample(words.PLACES, 2)
    thing, color = r.choice(words.THINGS), r.choice(words.COLORS)
    goal = r.choice(facts.GOALS)
    lead = r.choice(
        (
            f"{hero} was a {job} who lived near an old {place}.",
            f"Long ago a {job} called {hero} lived behind the {place}.",
            f"In a small town there was a {job}. Everybody called the {job} {hero}.",
        )
    )
    middle = r.choice(
        (
            f"One day {hero} lost a {color} {thing} on the way to the {other}.",
            f"One night a {animal} came to the door and carried a {color} {thing}.",
            f"One morning {hero} and {friend} found a {color} {thing} in the {other}.",
        )
    )
    turn = r.choice(
        (
            f'"We must {goal}," said {friend}. So they followed the {animal} to the {other}.',
            f"{hero} wanted to {goal}, but {friend} was afraid of the {animal}.",
            f"The {animal} looked at {hero} and did not move, so {friend} had an idea.",
        )
    )
    end = r.choice(
        (
            f"In the evening the {thing} was back, and they shared bread and tea.",
            f"At last they could {goal}, and {hero} gave the {thing} to {friend}.",
            f"From that day on the {animal} slept in the {place}, and nobody was afraid.",
        )
    )
    ask = r.choice(
        (
            f"Tell me a story about a {job} and a {animal}.",
            f"Write a short story with a {color} {thing} in it.",
            f"Tell me about {hero} the {job}.",
            f"Write a little tale about a {animal} and a {place}.",
        )
    )
    return ask, f"I tell of {hero}, a {job}, and what happened.", f"{lead} {middle} {turn} {end}"


KINDS = (
    (sorting, 5), (picking, 5), (tallying, 3), (turning, 3), (changing, 5), (finding, 8),
    (odd_one, 3), (weekdays, 3), (tale, 8),
)  # fmt: skip
