"""Every evaluation by its name: how it is made, how many cases it has, what picture shows it.

Read next: `tasks/`, `run.py`; `cli/evaluate.py` makes one command of each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from twinspark.errors import ConfigError, RequestError
from twinspark.evals.case import NOT_MEASURABLE
from twinspark.evals.evaluation import Evaluation
from twinspark.evals.judged import Judged
from twinspark.evals.plot import Picture
from twinspark.evals.tasks import needle
from twinspark.evals.tasks.count import Count
from twinspark.evals.tasks.drafts import Drafts
from twinspark.evals.tasks.effort import Effort
from twinspark.evals.tasks.needle import Needle
from twinspark.evals.tasks.sums import Sums
from twinspark.evals.tasks.text import TextPerplexity
from twinspark.evals.tasks.tools import Tools

MAX_SEED = 999_999  # larger ones are for training, see tasks/examples.py
MAX_LENGTH = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may say about an evaluation besides the number of its cases and their seed."""

    lengths: tuple[int, ...] = ()
    thinks: bool = False


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
        takes_thinking: whether it can be asked with thinking, besides without.
        lengths: of its prompts, where the user names none; empty where it has no such option.
        shortest: length that can be made.
    """

    name: str
    summary: str
    teaches: str
    cases: int
    picture: Picture
    make: Callable[[Options], Evaluation]
    takes_thinking: bool = False
    lengths: tuple[int, ...] = ()
    shortest: int = 1


def _json(options: Options) -> Evaluation:
    from twinspark.evals.tasks.json_schema import JsonSchema  # brings the tokenizers package

    return Judged(JsonSchema(thinks=options.thinks))


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="needle",
        summary=Needle.summary,
        teaches=(
            "Hides facts such as access codes in generated text of a length in tokens, beside "
            "others that look like them, and asks for them at the end. Right is the value asked "
            "for, and no other. Read the score by length; lengths that do not fit the context "
            "are left out and named."
        ),
        cases=40,
        picture="lengths",
        make=lambda options: Judged(Needle(options.lengths, thinks=options.thinks)),
        takes_thinking=True,
        lengths=needle.LENGTHS,
        shortest=needle.SHORTEST,
    ),
    Entry(
        name="tools",
        summary=Tools.summary,
        teaches=(
            "Offers generated tools and asks for something that one of them does; in two steps "
            "the tool's result comes back and must be used. Right is the right tool with the "
            "right arguments, and then the right answer."
        ),
        cases=40,
        picture="shares",
        make=lambda options: Judged(Tools(thinks=options.thinks)),
        takes_thinking=True,
    ),
    Entry(
        name="json",
        summary="write facts as JSON of a schema, held to it and not",
        teaches=(
            "Tells facts and asks for them as JSON of a schema: plain, and held to the schema by "
            "response_format (grammar). The score is the share of replies that are valid; `right` "
            "counts those with exactly these values."
        ),
        cases=40,
        picture="shares",
        make=_json,
        takes_thinking=True,
    ),
    Entry(
        name="sums",
        summary=Sums.summary,
        teaches=(
            "Asks for sums, differences and products of two-digit numbers, bare and in small "
            "stories, with thinking and without. Right is the right last number of the answer."
        ),
        cases=50,
        picture="shares",
        make=lambda _options: Judged(Sums()),
    ),
    Entry(
        name="effort",
        summary=Effort.summary,
        teaches=(
            "Asks the same sums of several numbers at reasoning efforts 10, 50, 75 and 100. Read "
            "the tokens by effort beside the share of right ones: more effort should think more. "
            "Efforts with a word are sent as that word; 10 goes as a number, which some servers "
            "refuse."
        ),
        cases=40,
        picture="effort",
        make=lambda _options: Judged(Effort()),
    ),
    Entry(
        name="count",
        summary=Count.summary,
        teaches=(
            "Asks for all numbers from one to another, up to 1 to 200, with commas or one a line. "
            "Right is all of them in order and nothing else. Tokens a round say what drafts bring "
            "on text that is easy to foresee."
        ),
        cases=15,
        picture="shares",
        make=lambda options: Judged(Count(thinks=options.thinks)),
        takes_thinking=True,
    ),
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


def room(*, thinks: bool) -> int:
    """Tokens that the reply to a prompt of a length may need."""
    return needle.reply_tokens(thinks=thinks)


def context_of(length: int, *, thinks: bool) -> int:
    """Tokens of a context that holds a prompt of a length and its reply, however it is counted."""
    return needle.longest_prompt(length, is_exact=False) + room(thinks=thinks)


def fitting_lengths(
    lengths: tuple[int, ...], room: int, context_tokens: int | None, *, is_exact: bool = True
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The lengths that a context holds with room for a reply, and a sentence about each other.

    Args:
        lengths: of the prompts.
        room: tokens for the reply.
        context_tokens: of the subject; None where it is not known.
        is_exact: whether tokens are counted and not estimated. Counted prompts are half a percent
            shorter than their length, so one of a long context's own length fits.

    Raises:
        RequestError: it holds none.
    """
    if not lengths or context_tokens is None:
        return lengths, ()
    left_out = {n: _left_out(n, room, context_tokens, is_exact=is_exact) for n in lengths}
    fits = tuple(n for n in lengths if not left_out[n])
    skipped = tuple(f"length {n}: {left_out[n]}" for n in lengths if left_out[n])
    if not fits:
        raise RequestError(
            f"none of the lengths {', '.join(map(str, lengths))} fits the context of "
            f"{context_tokens} tokens with {room} more for the reply; give shorter --lengths",
            code=NOT_MEASURABLE,
        )
    return fits, skipped


def _left_out(length: int, room: int, context_tokens: int, *, is_exact: bool) -> str:
    """Why a context does not hold a prompt of a length; "" if it does."""
    if length > context_tokens:  # even where its prompts, which are shorter, would fit
        return f"it is longer than the context of {context_tokens} tokens"
    prompt = needle.longest_prompt(length, is_exact=is_exact)
    if prompt + room > context_tokens:
        return (
            f"a prompt of up to {prompt} tokens, and {room} for the reply, are more than the "
            f"context of {context_tokens} tokens"
        )
    return ""
