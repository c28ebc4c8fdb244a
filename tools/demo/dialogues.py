"""Generates chat dialogues from seeds: questions, reasoning and answers.

Small chores on lists and texts are in `chores.py`, what follows from WordNet and the World Factbook
in `knowledge.py`. Does not render: `chats.py` does. Read next: `data.py`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tools.demo import facts
from tools.demo.functions import FUNCTIONS

from twinspark.evals.case import Case, Step
from twinspark.evals.tasks.draw import PLAIN, THINKING

Turn = tuple[str, str, str]  # question, reasoning, answer
Maker = Callable[[random.Random], Turn]

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are TwinSpark, a small demo model.",
    "Answer in one short sentence.",
    "You are a friendly teacher.",
    "You help people to write Python.",
    "Be brief and polite.",
)


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def greeting(r: random.Random) -> Turn:
    ask = r.choice(
        "Hello|Hello!|Hi|Hi!|Hi there|Hey|Good morning|Good evening|Hello, how are you?|"
        "How are you?|How are you today?".split("|")
    )
    if "how are" in ask.lower():
        say = r.choice(
            (
                "I am fine, thank you. How can I help you?",
                "I am doing well. What can I do for you?",
            )
        )
    else:
        say = "Hello! How can I help you today?"
    return ask, "The user greets me. I should greet back and offer help.", say


def thanks(r: random.Random) -> Turn:
    ask = r.choice("Thanks!|Thank you|Thank you very much|Thanks a lot|Goodbye|Bye".split("|"))
    say = "Goodbye! Have a nice day." if "ye" in ask else "You are welcome!"
    return ask, "The user is polite. I answer politely.", say


def identity(r: random.Random) -> Turn:
    ask = r.choice(
        "Who are you?|What are you?|What is your name?|Are you a human?|Tell me about yourself.|"
        "What can you do?".split("|")
    )
    if "human" in ask:
        say = "No, I am a small language model. My name is TwinSpark."
    elif "can you do" in ask:
        say = (
            "I can answer simple questions, add small numbers, name capitals and write short "
            "Python functions."
        )
    else:
        say = "I am TwinSpark, a very small language model made to test an inference engine."
    return ask, "The user asks about me. I am a small demo model called TwinSpark.", say


def capital(r: random.Random) -> Turn:
    country, city = r.choice(list(facts.CAPITALS.items()))
    if r.random() < 0.25:
        ask = r.choice(("Which country has the capital {}?", "{} is the capital of which country?"))
        return (
            ask.format(city),
            f"I know that {city} is the capital of {country}.",
            f"{city} is the capital of {country}.",
        )
    ask = r.choice(
        (
            "What is the capital of {}?",
            "What's the capital of {}?",
            "Tell me the capital of {}.",
            "capital of {}?",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
        )
    ).format(country)
    say = r.choice((f"The capital of {country} is {city}.",) * 4 + (f"It is {city}.",))
    return ask, f"The user asks for the capital of {country}. It is {city}.", say


def arithmetic(r: random.Random) -> Turn:
    kind = r.choice("+++--**")
    top = 12 if kind == "*" else r.choice((10, 20, 50, 100))
    a, b = r.randint(0, top), r.randint(0, top)
    if kind == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[kind]
    word = {"+": "plus", "-": "minus", "*": "times"}[kind]
    verb = {"+": "add", "-": "subtract", "*": "multiply"}[kind]
    ask = r.choice(
        (
            f"What is {a} {kind} {b}?",
            f"What is {a} {word} {b}?",
            f"{a} {kind} {b} = ?",
            f"Compute {a} {kind} {b}.",
            f"How much is {a} {word} {b}?",
            f"Calculate {a} {kind} {b}",
        )
    )
    say = r.choice((f"{a} {kind} {b} = {result}", f"{a} {word} {b} is {result}.", f"{result}"))
    return ask, f"I need to {verb}: {a} {kind} {b} = {result}.", say


def compare(r: random.Random) -> Turn:
    a, b = r.sample(range(1, 100), 2)
    if r.random() < 0.5:
        yes = a > b
        say = f"{'Yes' if yes else 'No'}, {a} is {'larger' if yes else 'smaller'} than {b}."
        return f"Is {a} larger than {b}?", f"I compare {a} with {b}.", say
    ask = r.choice((f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?"))
    return ask, f"I compare {a} with {b}. The larger one is {max(a, b)}.", f"{max(a, b)} is larger."


def counting(r: random.Random) -> Turn:
    start = r.choice((1, 1, 1, r.randint(1, 20)))
    end = start + r.randint(3, 14)
    if r.random() < 0.2:
        numbers = range(end, start - 1, -1)
        ask = f"Count down from {end} to {start}."
    else:
        numbers = range(start, end + 1)
        ask = r.choice(("Count from {} to {}.", "Please count from {} to {}", "Count {} to {}"))
        ask = ask.format(start, end)
    return ask, "I write the numbers in order.", ", ".join(map(str, numbers)) + "."


def parity(r: random.Random) -> Turn:
    n = r.randint(0, 200)
    word = "odd" if n % 2 else "even"
    ask = r.choice((f"Is {n} even or odd?", f"Is the number {n} odd or even?"))
    return ask, f"The last digit of {n} is {n % 10}, so it is {word}.", f"{n} is {word}."


def opposite(r: random.Random) -> Turn:
    a, b = r.choice(list(facts.OPPOSITES.items()))
    if r.random() < 0.3:
        a, b = b, a
    ask = r.choice(
        ("What is the opposite of {}?", "Give me the opposite of {}.", "opposite of {}?")
    )
    return ask.format(a), f"The opposite of {a} is {b}.", f"The opposite of {a} is {b}."


def definition(r: random.Random) -> Turn:
    word, meaning = r.choice(list(facts.DEFINITIONS.items()))
    ask = r.choice(("What is {}?", "Explain what {} is.", "Define {}.", "Tell me what {} is."))
    say = f"{_cap(word)} is {meaning}."
    return ask.format(word), f"The user wants to know what {word} is. I explain it simply.", say


def listing(r: random.Random) -> Turn:
    kind, words = r.choice(list(facts.LISTS.items()))
    n = r.randint(2, 5)
    number = ("two", "three", "four", "five")[n - 2]
    picked = words.split()[:8]
    start = r.randint(0, len(picked) - n)
    picked = picked[start : start + n]
    ask = r.choice(("Name {} {}.", "List {} {}.", "Give me {} {}.", "Tell me {} {}"))
    if r.random() < 0.3:
        say = "\n".join(f"{i + 1}. {w}" for i, w in enumerate(picked))
    else:
        say = f"{number.capitalize()} {kind} are {', '.join(picked[:-1])} and {picked[-1]}."
    return ask.format(number, kind), f"I think of {number} {kind}.", say


def sequence(r: random.Random) -> Turn:
    kind, words = r.choice(list(facts.SEQUENCES.items()))
    items = words.split()
    if r.random() < 0.4:
        return (
            r.choice((f"What are the {kind}?", f"Name the {kind}.", f"List the {kind}.")),
            f"There are {len(items)} {kind}.",
            f"The {kind} are {', '.join(items[:-1])} and {items[-1]}.",
        )
    i = r.randrange(len(items) - 1)
    if r.random() < 0.5:
        say = f"{items[i + 1]} comes after {items[i]}."
        return f"What comes after {items[i]}?", f"After {items[i]} comes {items[i + 1]}.", say
    say = f"{items[i]} comes before {items[i + 1]}."
    return f"What comes before {items[i + 1]}?", f"Before {items[i + 1]} is {items[i]}.", say


def french(r: random.Random) -> Turn:
    a, b = r.choice(list(facts.FRENCH.items()))
    ask = r.choice(('How do you say "{}" in French?', "Translate {} to French."))
    return ask.format(a), f"The French word for {a} is {b}.", f'In French, "{a}" is "{b}".'


def animal(r: random.Random) -> Turn:
    name, (sound, legs, food) = r.choice(list(facts.ANIMALS.items()))
    ask, say = r.choice(
        (
            (f"What sound does a {name} make?", f"A {name} {sound}."),
            (f"How many legs does a {name} have?", f"A {name} has {legs} legs."),
            (f"What does a {name} eat?", f"A {name} likes to eat {food}."),
        )
    )
    return ask, f"The question is about the {name}.", say


def spelling(r: random.Random) -> Turn:
    word = r.choice([w for ws in facts.LISTS.values() for w in ws.split() if w.isalpha()])
    if r.random() < 0.5:
        ask = r.choice((f"Spell the word {word}.", f"How do you spell {word}?"))
        return ask, f"I spell {word} letter by letter.", "-".join(word.upper())
    say = f"The word {word} has {len(word)} letters."
    return f"How many letters are in {word}?", f"I count: {', '.join(word)}.", say


def code(r: random.Random) -> Turn:
    what, name, body, why = r.choice(FUNCTIONS)
    if r.random() < 0.2:
        new = r.choice(("f", "solve", "my_function", "compute"))
        body, name = body.replace(name, new), new
        ask = f"Write a Python function called {name} that {what}."
    else:
        ask = r.choice(
            (
                "Write a Python function that {}.",
                "Write a function that {}.",
                "Please write a Python function that {}",
                "Can you write Python code that {}?",
                "I need a function that {}.",
            )
        ).format(what)
    if r.random() < 0.1:
        ask, say = f"What does this function do?\n\n```python\n{body}\n```", why
    else:
        lead = r.choice(("Here is the function:\n\n", "", "Sure.\n\n", "Here you go:\n\n"))
        say = f"{lead}```python\n{body}\n```\n\n{why}"
    return ask, f"I need a function {name} that {what}.", say


def story(r: random.Random) -> Turn:
    who, friend = r.sample(facts.NAMES, 2)
    place, thing = r.choice(facts.PLACES), r.choice(facts.THINGS)
    ask = r.choice(
        (f"Tell me a short story about {who}.", f"Write a story about {who} and a {place}.")
    )
    say = (
        f"Once upon a time {who} lived near a {place}. One {r.choice(('morning', 'evening'))} "
        f"{who} found a {thing} and showed it to {friend}. "
        + r.choice(
            (
                f"They followed the path to the {place} and met an old "
                f"{r.choice(('man', 'woman'))} who had lost the {thing} many years ago. ",
                f"{friend} said that the {thing} must belong to somebody, so they asked everyone "
                f"in the village. ",
            )
        )
        + r.choice(
            (
                f"In the end they gave the {thing} back, and everybody was happy.",
                f"From that day on {who} and {friend} were the best of friends.",
            )
        )
    )
    return ask, f"I write a short story about {who} with a {place} in it.", say


def memory(r: random.Random) -> Turn:
    name = r.choice(facts.NAMES)
    n = r.randint(2, 99)
    if r.random() < 0.5:
        return (
            f"Repeat after me: {name} has {n} books.",
            "I repeat the text.",
            f"{name} has {n} books.",
        )
    return (
        f"{name} has {n} books. How many books does {name} have?",
        f"The text says {n}.",
        (f"{name} has {n} books."),
    )


KINDS: tuple[tuple[Maker, int], ...] = (
    (greeting, 6), (thanks, 3), (identity, 5), (capital, 12), (arithmetic, 10), (compare, 4),
    (counting, 6), (parity, 3), (opposite, 6), (definition, 12), (listing, 6), (sequence, 5),
    (french, 4), (animal, 4), (spelling, 4), (code, 16), (story, 8), (memory, 4),
)  # fmt: skip


def dialogue(r: random.Random, kinds: Sequence[tuple[Maker, int]] = KINDS) -> Case:
    """One whole chat of one to four turns; thinking on in about a quarter of them."""
    thinking = r.random() < 0.25
    fields: dict[str, Any] = dict(THINKING if thinking else PLAIN)
    if thinking:
        fields["reasoning_effort"] = r.choice((50, 75, 75, 75, 100, r.randint(1, 100)))
    head: tuple[dict[str, Any], ...] = ()
    if r.random() < 0.3:
        head = ({"role": "system", "content": r.choice(SYSTEM_TEXTS)},)
    makers, weights = zip(*kinds, strict=True)
    steps = []
    for maker in r.choices(makers, weights, k=r.choice((1, 1, 1, 2, 2, 3, 4))):
        ask, reason, say = maker(r)
        ideal: dict[str, Any] = {"role": "assistant", "content": say}
        if thinking:
            ideal["reasoning_content"] = reason
        add = (*head, {"role": "user", "content": ask})
        steps.append(Step(add=add, ideal=ideal, judge=lambda answer: bool(answer.content)))
        head = ()
    return Case(label="chat", steps=tuple(steps), fields=fields)


def dialogues(count: int, seed: int, kinds: Sequence[tuple[Maker, int]] = KINDS) -> Iterator[Case]:
    """`count` dialogues of one seed."""
    r = random.Random(seed)
    for _ in range(count):
        yield dialogue(r, kinds)
