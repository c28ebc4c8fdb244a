"""What the backbone is trained on, when, and how fast: the tables of the third edition.

Everything goes by progress, 0 at the first step and 1 at the last, over all calls of the trainer.
A step holds TOKENS tokens at every length. Owns no tensors. Read next: `train.py`.
"""

from dataclasses import dataclass

TOKENS = 32768  # of a step
SOURCES = ("chat", "code", "docs", "prose", "tasks", "needle4k", "needle16k", "needle32k")

# Shares of the sources among the windows of one length (relative; absent files are left out).
SHARES: dict[int, dict[str, float]] = {
    2048: {
        "tasks": 0.50, "code": 0.19, "docs": 0.07, "prose": 0.08, "chat": 0.08, "needle4k": 0.08,
    },
    8192: {
        "needle4k": 0.45, "needle16k": 0.15, "code": 0.20, "docs": 0.10, "prose": 0.10,
    },
    32768: {"needle16k": 0.35, "needle32k": 0.40, "code": 0.15, "prose": 0.10},
}  # fmt: skip

# (until this progress, {length: share of the steps}); the first stage attends to every row, so
# that the indexer learns from whole attention before it selects. Retrieval was learned by the
# second edition, which this one begins from; without it long windows should come at 0.55.
DENSE_UNTIL = 0.08
STAGES: tuple[tuple[float, dict[int, float]], ...] = (
    (0.82, {2048: 1.0}),
    (1.00, {2048: 0.65, 8192: 0.20, 32768: 0.15}),
)

WARMUP_STEPS = 200
DECAY_FROM = 0.40  # of the progress; linear to LOWEST, which averages as well as an average would
LOWEST = 0.01
INDEX_WEIGHT, FIND_WEIGHT, COPY_WEIGHT = 1.0, 1.0, 0.5
LEAK = 0.5  # of the index losses' gradient reaches the model below the indexer
# Of tokens that are no targets, prompts and the text around needles: a long window has a few
# hundred targets, and its step should still teach the language.
CONTEXT_WEIGHT = 0.1
# Further weight in the cross entropy of tokens that are copied from far: a value among a thousand
# tokens of needles; in tasks every third target is one, and the others have to be learned too.
ANSWER_WEIGHT = 8.0
ANSWER_WEIGHTS = {"tasks": 4.0}  # where it is another
FINDS = 4096  # copying queries a step that are supervised, at most; a quarter in long windows


@dataclass(frozen=True)
class Form:
    """The shape of a step.

    Attributes:
        length: tokens of a window.
        batch: windows.
        dense: every visible row is attended.
        long: lists of rows instead of masks.
        recompute: long form only, attention is computed again in the backward pass.
    """

    length: int
    batch: int
    dense: bool = False
    long: bool = False
    recompute: bool = False

    def smaller(self) -> "Form | None":
        """The next form to try when this one does not fit the memory."""
        if self.long and not self.recompute:
            return Form(self.length, self.batch, self.dense, True, True)
        if self.batch > 1:
            return Form(self.length, self.batch // 2, self.dense, self.long, self.recompute)
        return None


@dataclass(frozen=True)
class Plan:
    """A curriculum; the defaults are the real one, tests and rehearsals pass their own."""

    tokens: int = TOKENS
    shares: tuple[tuple[int, dict[str, float]], ...] = tuple(SHARES.items())
    stages: tuple[tuple[float, dict[int, float]], ...] = STAGES
    long_from: int = 4096  # lengths from here on use the long form
    finds: int = FINDS

    def form(self, length: int, *, dense: bool) -> Form:
        """The form of a length."""
        return Form(length, max(1, self.tokens // length), dense, length >= self.long_from)

    def queries(self, form: Form) -> int:
        """Copying queries of one window that are supervised, at most."""
        return max(32, (self.finds // 4 if form.long else self.finds) // form.batch)

    def mix(self, progress: float) -> dict[int, float]:
        """Shares of the lengths among the steps at this progress."""
        return next((mix for until, mix in self.stages if progress < until), self.stages[-1][1])

    def forms(self, start: float, end: float) -> list[Form]:
        """Every form that a call from one progress to another uses."""
        found: list[Form] = []
        begins = 0.0
        for until, mix in self.stages:
            if begins < end and until > start:
                if begins <= start < DENSE_UNTIL or start <= begins < DENSE_UNTIL:
                    found += [self.form(n, dense=True) for n in mix]
                if end > DENSE_UNTIL:
                    found += [self.form(n, dense=False) for n in mix]
            begins = until
        return list(dict.fromkeys(found))

    def sources(self, length: int) -> dict[str, float]:
        """Shares of the sources of a length."""
        return dict(self.shares)[length]


def rate_factor(step: int, progress: float) -> float:
    """Learning rate as a share of its peak."""
    decay = (1 - progress) / (1 - DECAY_FROM)
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(LOWEST, min(1.0, decay))


def next_length(credit: dict[int, float], mix: dict[int, float]) -> int:
    """The length of the next step; `credit` remembers what each length is owed."""
    for length in list(credit):
        if length not in mix:
            del credit[length]
    for length, share in mix.items():
        credit[length] = credit.get(length, 0.0) + share
    chosen = max(credit, key=lambda n: (credit[n], -n))
    credit[chosen] -= 1.0
    return chosen
