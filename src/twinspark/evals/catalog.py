"""Every evaluation by its name: how it is made, how many cases it has, what picture shows it.

Read next: `tasks/`, `run.py`; `cli/evaluate.py` makes one command of each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from twinspark.errors import ConfigError
from twinspark.evals.evaluation import Evaluation
from twinspark.evals.plot import Picture
from twinspark.evals.tasks.drafts import Drafts
from twinspark.evals.tasks.text import TextPerplexity

MAX_SEED = 999_999  # larger ones are for training
MAX_LENGTH = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may say about an evaluation besides the number of its cases and their seed."""

    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An evaluation that can be asked for.

    Attributes:
        name: on the command line.
        summary: one line.
        teaches: what is asked, what counts as right, how to read the score.
        cases: their number where the user says none.
        picture: what its plot shows.
        make: the evaluation.
        lengths: of its prompts, where the user names none; empty where it has no such option.
        shortest: length that can be made.
        reply_tokens: what a prompt of a length needs besides it.
    """

    name: str
    summary: str
    teaches: str
    cases: int
    picture: Picture
    make: Callable[[Options], Evaluation]
    lengths: tuple[int, ...] = ()
    shortest: int = 1
    reply_tokens: int = 0


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="text",
        summary=TextPerplexity.summary,
        teaches=(
            "Scores passages of code and prose that this project wrote, so that no model was "
            "trained on them. The score is one over the perplexity, the mean probability of a "
            "token; perplexity and bits a byte are beside it. Compare bits a byte between models "
            "with other tokenizers. A server needs /completions with echo and logprobs."
        ),
        cases=16,
        picture="perplexity",
        make=lambda _options: TextPerplexity(),
    ),
    Entry(
        name="drafts",
        summary=Drafts.summary,
        teaches=(
            "Asks for code, prose and JSON and counts tokens a round of decoding. The score is "
            "the share of tokens that came as accepted drafts, 1 - rounds / tokens; replies are "
            "not judged. In this process every round drafts the whole block and nothing is "
            "copied, so the figure is the pack's own and not the machine's. A server must say "
            "its rounds (stats.rounds, as ours does); it drafts as it is set."
        ),
        cases=12,
        picture="rounds",
        make=lambda _options: Drafts(),
    ),
)


def find(name: str) -> Entry:
    """The entry of a name.

    Raises:
        ConfigError: there is none.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in ENTRIES)
    raise ConfigError(f"no evaluation {name!r}; known are {known}, and all")


def parse_lengths(text: str | None, entry: Entry) -> tuple[int, ...]:
    """Lengths of a list such as "1024,4096", ascending; None gives the entry's own.

    Raises:
        ConfigError: it is no such list.
    """
    if text is None:
        return entry.lengths
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"--lengths is {text!r}, expected whole numbers of tokens with commas between them, "
            "such as 1024,4096"
        ) from error
    if found[0] < entry.shortest or found[-1] > MAX_LENGTH:
        raise ConfigError(
            f"--lengths is {text!r}, expected lengths of {entry.shortest} to {MAX_LENGTH} tokens"
        )
    return tuple(found)


def fitting_lengths(
    lengths: tuple[int, ...], entry: Entry, context_tokens: int | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The lengths that a context holds, and a sentence about each that it does not.

    Raises:
        ConfigError: it holds none.
    """
    if not lengths or context_tokens is None:
        return lengths, ()
    fits = tuple(n for n in lengths if n + entry.reply_tokens <= context_tokens)
    skipped = tuple(
        f"length {n}: with its reply it needs {n + entry.reply_tokens} tokens, the context is "
        f"{context_tokens}"
        for n in lengths
        if n not in fits
    )
    if not fits:
        raise ConfigError(
            f"none of the lengths {', '.join(map(str, lengths))} fits the context of "
            f"{context_tokens} tokens with {entry.reply_tokens} more for the reply; give shorter "
            "--lengths"
        )
    return fits, skipped
