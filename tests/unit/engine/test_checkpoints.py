"""Where pieces end and what is kept there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinspark.engine.checkpoints import Mark, MarkRules, plan_marks

RULES = MarkRules(spacing=16, encoder_gap=10, window=4)
PLAIN = {"start": 0, "wanted": (), "is_replay": False, "is_saving": True, "has_decoder_state": True}


def marks(prompt_end, rules=RULES, **changes):
    return plan_marks(rules, prompt_end=prompt_end, **{**PLAIN, **changes})


def test_a_prompt_ends_in_a_full_checkpoint():
    assert marks(9) == [Mark(9, 9)]
    assert marks(0) == [] == marks(20, start=20)
    assert marks(9, is_saving=False, wanted=(3,)) == [Mark(9, 9, is_saved=False)]


def test_marked_positions_are_apexes_of_their_own():
    assert marks(15, wanted=(4, 9, 15, 99, 0)) == [Mark(4, 4), Mark(9, 9), Mark(15, 15)]
    assert marks(15, wanted=(4, 9), start=4) == [Mark(9, 9), Mark(15, 15)]


@pytest.mark.parametrize(("prompt_end", "positions"), [(25, []), (26, [16]), (42, [16, 32])])
def test_encoder_checkpoints_have_the_cone_behind_them(prompt_end, positions):
    assert [m.position for m in marks(prompt_end) if not m.is_apex] == positions


def test_an_encoder_checkpoint_belongs_to_the_next_apex():
    assert marks(60, wanted=(30,)) == [Mark(16, 30), Mark(30, 30), Mark(32, 60), Mark(48, 60),
                                       Mark(60, 60)]  # fmt: skip
    assert marks(60, wanted=(32,))[1] == Mark(32, 32)


def test_after_an_encoder_only_state_the_first_apex_is_the_cone_away():
    found = marks(60, start=16, wanted=(17, 25, 26), has_decoder_state=False)
    assert [m.position for m in found if m.is_apex] == [26, 60]


def test_a_replay_has_one_apex_and_keeps_marks_before_its_window():
    found = marks(60, wanted=(7,), is_replay=True)
    assert [m.position for m in found] == [7, 16, 32, 48, 60]
    assert {m.apex for m in found} == {60}
    assert [m.position for m in marks(35, is_replay=True)] == [16, 35]  # 32 is inside the window


@given(
    start=st.integers(0, 200), length=st.integers(0, 200),
    wanted=st.lists(st.integers(0, 400), max_size=5), spacing=st.integers(1, 40),
    gap=st.integers(1, 60), is_replay=st.booleans(), has_decoder_state=st.booleans(),
)  # fmt: skip
def test_marks_are_in_order_and_end_the_prompt(
    start, length, wanted, spacing, gap, is_replay, has_decoder_state
):
    end = start + length
    rules = MarkRules(spacing=spacing, encoder_gap=gap, window=4)
    found = marks(end, rules, start=start, wanted=wanted, is_replay=is_replay,
                  has_decoder_state=has_decoder_state)  # fmt: skip
    positions = [m.position for m in found]
    assert positions == sorted(set(positions)) and all(p > start for p in positions)
    assert (positions[-1:] == [end]) == (length > 0)
    for mark in found:
        apex = min(m.position for m in found if m.is_apex and m.position >= mark.position)
        assert mark.apex == apex
        if not mark.is_apex and mark.position not in wanted:
            assert mark.apex - mark.position >= (4 if is_replay else gap)
        if mark.is_apex and mark.position < end and not has_decoder_state:
            assert mark.position - start >= gap
