"""Needles for training: facts in generated and in real text, several questions after one text.

Facts, questions and generated text are those of `twinspark.evals.tasks.needle`; real text is cut
out of the packed streams. The tokens of a value in a reply know where they were copied from
(`Example.find`). Read next: `data.py`.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tools.demo.chats import Example, example, token_starts

from twinspark.evals.case import Case, Step
from twinspark.evals.tasks import needle
from twinspark.evals.tasks.draw import PLAIN
from twinspark.evals.tasks.needle import Fact
from twinspark.text.tokenizer import Tokenizer

FEWEST = needle.SHORTEST + 128  # tokens of a document
GENERATED = 0.4  # of the documents are in generated text, as the evaluation's are
AROUND, A_FACT, A_QUESTION = 24, 26, 48  # tokens that they need at most, or nearly so
_PAIRS = 0.15  # of the questions are about two facts


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Real text to hide in: packed tokens by kind, and where their documents begin."""

    tokens: dict[str, np.ndarray]
    starts: dict[str, np.ndarray]

    @classmethod
    def of(cls, tokens: dict[str, np.ndarray]) -> "Streams":
        """Streams whose documents begin with id 0."""
        return cls(tokens=tokens, starts={k: np.flatnonzero(v == 0) for k, v in tokens.items()})

    def cut(self, r: random.Random, size: int, tokenizer: Tokenizer) -> tuple[str, list[str]]:
        """Kind and lines of about `size` tokens, from the beginning of a document on."""
        kind = r.choice(sorted(self.tokens))
        stream, starts = self.tokens[kind], self.starts[kind]
        begin = int(starts[r.randrange(int(np.searchsorted(starts, len(stream) - size)))])
        parts = (
            tokenizer.token_bytes(i) if i > 1 else b"\n" * i
            for i in stream[begin : begin + size].tolist()
        )
        lines = b"".join(parts).decode("utf-8", "ignore").splitlines(keepends=True)
        return kind, [*lines[:-1], lines[-1].rstrip("\n") + "\n"]


def lengths(r: random.Random, length: int) -> Iterator[int]:
    """Endless lengths of documents that fill windows of `length`: alone, in pairs or threes."""
    while True:
        count = r.choice((1, 1, 1, 2, 2, 3))
        left = length
        for n in range(count, 1, -1):
            part = int(left / n * r.uniform(0.6, 1.4))
            yield part
            left -= part
        yield left


def examples(
    length: int, tokens: int, seed: int, streams: Streams, tokenizer: Tokenizer, *, most: int = 8
) -> Iterator[Example]:
    """Needle documents for windows of `length` tokens.

    Args:
        length: of the windows; a document is never longer.
        tokens: about how many to make in all.
        seed: of the draws.
        streams: real text.
        tokenizer: the demo model's.
        most: facts that are asked for after one text.
    """
    r = random.Random(f"needles/{length}/{seed}")
    made = 0
    for size in lengths(r, length):
        if made >= tokens:
            return
        if size < FEWEST:
            continue
        groups, prompt = _prompt(r, size, streams, tokenizer, most)
        found = example(conversation(prompt, groups, r), tokenizer)
        if len(found.ids) <= size:
            mark_values(found, prompt, groups, tokenizer)
            made += len(found.ids)
            yield found


Groups = list[tuple[Fact, ...]]  # the facts of each question


def _prompt(
    r: random.Random, size: int, streams: Streams, tokenizer: Tokenizer, most: int
) -> tuple[Groups, str]:
    """The questions' facts, and the first message with the first question."""
    if r.random() < GENERATED:
        room = max(size - AROUND - 5 * A_QUESTION, needle.SHORTEST)
        made = needle.build(r, room, lambda text: len(tokenizer.encode_plain(text)))
        return [made.asked, *((fact,) for fact in made.others)], made.prompt
    asked = needle.draw_facts(r, r.randint(1, min(most, size // 150)))
    others = needle.draw_facts(r, r.randint(0, 3), like=asked)
    facts = (*asked, *others)
    room = size - AROUND - A_FACT * len(facts) - A_QUESTION * len(asked)
    kind, lines = streams.cut(r, room, tokenizer)
    before = "# " if kind == "code" else ""
    hidden = needle.hide(lines, facts, r, before=before, after="\n")
    groups = _groups(r, asked)
    return groups, f"{hidden.text}\n\n{needle.question(groups[0], r)}"


def _groups(r: random.Random, asked: Sequence[Fact]) -> Groups:
    found: Groups = []
    at = 0
    while at < len(asked):
        count = 2 if r.random() < _PAIRS else 1
        found.append(tuple(asked[at : at + count]))
        at += count
    return found


def conversation(prompt: str, groups: Groups, r: random.Random) -> Case:
    """The first message with its answer, then the other questions one by one."""
    steps = []
    for n, facts in enumerate(groups):
        content = prompt if n == 0 else needle.question(facts, r)
        steps.append(
            Step(
                add=({"role": "user", "content": content},),
                ideal={"role": "assistant", "content": needle.reply(facts)},
                judge=lambda answer, facts=facts: needle.is_right(answer.content, facts, ()),
            )
        )
    return Case(label="needle", steps=tuple(steps), fields=PLAIN)


def mark_values(made: Example, prompt: str, groups: Groups, tokenizer: Tokenizer) -> None:
    """Fills `find` for the values in the replies; `prompt` is the first user message."""
    user = int(np.flatnonzero(made.ids == tokenizer.user_id)[0]) + 1
    source = token_starts(made.ids[user : made.replies[0][0]].tolist(), tokenizer)
    for (begin, end), facts in zip(made.replies, groups, strict=True):
        target = token_starts(made.ids[begin:end].tolist(), tokenizer)
        reply = needle.reply(facts)
        at = 0
        for fact in facts:
            at = reply.index(f" is {fact.value}.", at) + len(" is ")
            stated = prompt.index(fact.statement) + fact.statement.rindex(fact.value)
            first = user + _token_at(source, len(prompt[:stated].encode()))
            to = begin + _token_at(target, len(reply[:at].encode()))
            last = begin + _token_at(target, len(reply[: at + len(fact.value)].encode()) - 1)
            for n in range(last + 1 - to):
                if made.ids[to + n] != made.ids[first + n]:
                    break
                made.find[to + n] = first + n


def _token_at(starts: np.ndarray, byte: int) -> int:
    return int(np.searchsorted(starts, byte, side="right")) - 1
