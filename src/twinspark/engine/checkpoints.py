"""Where the pieces of a prompt must end, and what is kept there (design decision 24).

A pure function of the request and of where it starts. A full state needs the cone to have run to
its apex, so every full checkpoint is an apex. Read next: `pages.py` (who saves), `scheduler.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Mark:
    """A position where a piece ends.

    Attributes:
        position: rows below it are run before.
        apex: where the cone that these rows belong to ends, here or later.
        is_saved: a state is kept; a full one at an apex.
    """

    position: int
    apex: int
    is_saved: bool = True

    @property
    def is_apex(self) -> bool:
        """Whether the windows of all layers are right here."""
        return self.position == self.apex


@dataclass(frozen=True, kw_only=True)
class MarkRules:
    """What decides the marks besides the request.

    Attributes:
        spacing: prompt positions between encoder checkpoints.
        encoder_gap: rows the cone needs behind an encoder-only state.
        window: W; a bounded replay runs the decoder layers on the last W rows.
    """

    spacing: int
    encoder_gap: int
    window: int

    def gap(self, *, is_replay: bool) -> int:
        """Prompt rows that must follow an encoder-only state for it to be enough."""
        return self.window if is_replay else self.encoder_gap


def plan_marks(
    rules: MarkRules,
    *,
    start: int,
    prompt_end: int,
    wanted: Iterable[int],
    is_replay: bool,
    is_saving: bool,
    has_decoder_state: bool,
) -> list[Mark]:
    """Lay out what is left of a prompt.

    A bounded replay has one apex, the prompt's end, and no decoder state worth keeping: everything
    it saves is encoder-only.

    Args:
        rules: see there.
        start: first position to run.
        prompt_end: the prompt's last token, which is decoded.
        wanted: positions the client would like to go on from later.
        is_replay: decoder layers run on the last W rows only.
        is_saving: states are kept at all.
        has_decoder_state: False after an encoder-only state, which no apex may follow too closely.

    Returns:
        Marks behind `start`, ascending; the last one is `prompt_end`. Empty if nothing is left.
    """
    if prompt_end <= start:
        return []
    if not is_saving:
        return [Mark(prompt_end, prompt_end, is_saved=False)]
    nearest = start + 1 if has_decoder_state else start + rules.encoder_gap
    full = sorted({p for p in wanted if start < p < prompt_end and (is_replay or p >= nearest)})
    full.append(prompt_end)
    marks = {p: Mark(p, prompt_end if is_replay else p) for p in full}
    gap = rules.gap(is_replay=is_replay)
    for low, high in pairwise([start, *full]):
        first = (low // rules.spacing + 1) * rules.spacing
        for p in range(first, high - gap + 1, rules.spacing):
            marks.setdefault(p, Mark(p, prompt_end if is_replay else high))
    return [marks[p] for p in sorted(marks)]
