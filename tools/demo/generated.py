"""The generated conversations of training: chats, and the tasks' cases of training seeds.

How many of each, and of which seeds. Read next: `data.py`.
"""

import pathlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from tools.demo import chores, dialogues, knowledge, marks, marks_numbers, sources
from tools.demo.chats import Example, example
from tools.demo.dialogues import Maker
from tools.demo.marks import Marks

from twinspark.evals.case import Case, Task
from twinspark.evals.tasks.count import Count
from twinspark.evals.tasks.effort import Effort
from twinspark.evals.tasks.examples import TRAINING_SEEDS, turns
from twinspark.evals.tasks.json_schema import JsonSchema
from twinspark.evals.tasks.needle import Needle
from twinspark.evals.tasks.sums import Sums
from twinspark.evals.tasks.tools import Tools
from twinspark.text.tokenizer import Tokenizer

Kinds = Sequence[tuple[Maker, int]]
SEEDS = {"train": TRAINING_SEEDS, "heldout": 2 * TRAINING_SEEDS}
CHATS = 80_000
MARKS = {
    "needle": marks.mark_needle,
    "tools": marks.mark_tools,
    "json": marks.mark_json,
    "sums": marks_numbers.mark_sums,
    "effort": marks_numbers.mark_effort,
    "count": marks_numbers.mark_count,
}
HELD_OUT = 0.02  # as many as this of the training conversations
MOST_TOKENS = 2048
SHORT_NEEDLES = (640, 1024, 1536)


def task_numbers() -> tuple[tuple[Task, int], ...]:
    """The tasks, and how many cases of each are trained on.

    Thinking is the server's default, so some of each think; efforts that the evaluation does not
    ask for are there too, for a user may.
    """
    return (
        (Sums(), 40_000),
        (Tools(), 36_000),
        (Tools(thinks=True), 12_000),
        (JsonSchema(), 40_000),
        (JsonSchema(thinks=True), 12_000),
        (Effort(), 20_000),
        (Effort((5, 25, 35, 60, 66, 85, 90)), 14_000),
        (Count(), 14_000),
        (Count(thinks=True), 4_000),
        (Needle(SHORT_NEEDLES), 3_000),
        (Needle(SHORT_NEEDLES, thinks=True), 1_000),
    )


def chat_kinds(archives: pathlib.Path, known: Iterable[sources.Source]) -> Kinds:
    """All kinds of chat turns with their weights. Errors as `knowledge.makers`."""
    return [*dialogues.KINDS, *chores.KINDS, *knowledge.makers(archives, known)]


def chats(split: str, model: Tokenizer, scale: float, kinds: Kinds) -> Iterator[Example]:
    """Chats of a split."""
    for case in dialogues.dialogues(_number(CHATS, split, scale), SEEDS[split], kinds):
        yield example(case, model)


def tasks(split: str, model: Tokenizer, scale: float) -> Iterator[Example]:
    """The tasks' cases of a split, in turn, none longer than MOST_TOKENS."""
    for task, case in _shuffled(split, scale, lambda text: len(model.encode_plain(text))):
        made = example(case, model)
        if len(made.ids) <= MOST_TOKENS:
            MARKS[task.name](Marks(made, model), case)
            yield made


def plain_texts(kinds: Kinds, scale: float, r: random.Random) -> Iterator[str]:
    """What the tokenizer sees of conversations: plain segments of some of them."""
    cases = list(dialogues.dialogues(int(8_000 * scale) or 50, r.randrange(1 << 30), kinds))
    cases += [case for _, case in _shuffled("train", scale / 12, lambda text: len(text) // 3)]
    for case in cases:
        last = turns(case)[-1]
        for segment in (*last.prompt.segments, *last.reply):
            if not segment.special:
                yield segment.text


def _number(full: int, split: str, scale: float) -> int:
    return max(int(full * scale * (1 if split == "train" else HELD_OUT)), 4)


def _shuffled(
    split: str, scale: float, count_tokens: Callable[[str], int]
) -> Iterator[tuple[Task, Case]]:
    """Cases of all tasks in a drawn order of the tasks."""
    running = [
        (task, task.cases(number, SEEDS[split] + n, count_tokens), number)
        for n, (task, full) in enumerate(task_numbers())  # a seed each: none is another's twin
        for number in (_number(full, split, scale),)
    ]
    r = random.Random(f"tasks/{split}")
    order = [n for n, (_, _, number) in enumerate(running) for _ in range(number)]
    r.shuffle(order)
    for n in order:
        task, cases, _ = running[n]
        yield task, next(cases)
