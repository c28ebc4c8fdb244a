"""Plans on the wire: exact there and back, small, and garbage is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinspark.distributed.frames import HEADER_BYTES, Frame, FrameKind, parse_frame
from twinspark.engine.plan import (
    BindPages,
    CopyPage,
    DropRows,
    DropState,
    Layers,
    LoadState,
    PlannedRows,
    SaveState,
    StepPlan,
)
from twinspark.engine.wire import decode_draft, decode_step, encode_draft, encode_step
from twinspark.errors import FormatError
from twinspark.model.step import DraftRequest

SLOTS = st.integers(0, 255)
TOKENS = st.integers(0, 2**31 - 1)
PLACES = st.integers(0, 2**40)
OPS = st.one_of(
    st.builds(BindPages, slot=SLOTS, pages=st.lists(TOKENS, max_size=9).map(tuple)),
    st.builds(CopyPage, source=PLACES, target=PLACES),
    st.builds(SaveState, slot=SLOTS, position=PLACES, state_id=PLACES, encoder_only=st.booleans()),
    st.builds(LoadState, slot=SLOTS, position=PLACES, state_id=PLACES),
    st.builds(DropState, state_id=PLACES),
    st.builds(DropRows, slot=SLOTS),
)
ROWS = st.builds(
    PlannedRows,
    slot=SLOTS,
    first=PLACES,
    ids=st.lists(TOKENS, min_size=1, max_size=9).map(tuple),
    history=st.lists(TOKENS, max_size=3).map(tuple),
    prompt_end=st.none() | PLACES,
    mode=st.sampled_from(["full", "cone", "replay"]),
    wants_logits=st.booleans(),
    is_pruned=st.booleans(),
    has_bf16_mixing=st.booleans(),
)


@st.composite
def plans(draw):
    """Pieces begin in one pass with the windows or from layer 0 on; others go on behind that."""
    pieces = tuple(draw(st.lists(ROWS, max_size=3)))
    first = 0 if pieces else draw(st.integers(1, 80))
    layers = st.builds(Layers, st.just(first), st.integers(first + 1, 99))
    return StepPlan(
        round=draw(PLACES),
        windows=tuple(draw(st.lists(ROWS, max_size=5))),
        pieces=pieces,
        ops=tuple(draw(st.lists(OPS, max_size=6))),
        layers=draw(st.none() | layers),
    )


PLANS = plans()
DRAFTS = st.lists(st.builds(DraftRequest, slot=SLOTS, position=PLACES, token=TOKENS), max_size=9)


@given(PLANS)
def test_a_plan_comes_back_as_it_was(plan):
    assert decode_step(parse_frame(encode_step(plan).pack())) == plan


@given(DRAFTS)
def test_a_draft_pass_comes_back_as_it_was(requests):
    assert decode_draft(parse_frame(encode_draft(requests).pack())) == requests


def test_a_round_of_four_slots_is_one_small_frame():
    window = {"ids": (7,) * 6, "history": (1, 2, 3)}
    windows = tuple(PlannedRows(slot=s, first=2**20 - 9, **window) for s in range(4))
    plan = StepPlan(round=10**6, windows=windows, pieces=())
    assert len(encode_step(plan).pack()) == HEADER_BYTES + 4 * (32 + 4 * 9) == 304
    assert len(encode_draft([DraftRequest(slot=0, position=1, token=2)] * 4).pack()) == 96


def test_the_bytes_are_fixed():
    rows = PlannedRows(slot=1, first=2, ids=(3, 4), history=(), prompt_end=9, mode="cone")
    plan = StepPlan(round=5, windows=(), pieces=(rows,), ops=(BindPages(slot=1, pages=(6,)),))
    assert encode_step(plan).pack().hex() == (
        "545753500100010005000000000000000100000000000000010000004c000000"
        "01000000010000000100000000000000" + "00" * 16
        + "01000000020000000000000001000000" + "02000000000000000900000000000000"
        + "06000000" + "0300000004000000"
    )  # fmt: skip


@pytest.mark.parametrize("layers", [(0, 0), (3, 3), (-1, 2), (5, 4), (1, 2), (2, 9)])
def test_layers_that_pieces_cannot_run_are_refused(layers):
    """Those that begin do so at layer 0; nothing begins anywhere else."""
    rows = PlannedRows(slot=1, first=2, ids=(3, 4), history=(), prompt_end=9, mode="cone")
    plan = StepPlan(round=5, windows=(rows,), pieces=(rows,), layers=Layers(*layers))
    with pytest.raises(FormatError, match="layers"):
        decode_step(encode_step(plan))
    with pytest.raises(FormatError, match="layers"):
        decode_step(encode_step(plan._replace(pieces=(), layers=Layers(0, 4))))


@settings(max_examples=300)
@given(st.data())
def test_garbage_is_refused_and_never_worse(data):
    """Any change of a frame gives another valid plan or a FormatError, nothing else."""
    plan = data.draw(PLANS)
    frame = bytearray(encode_step(plan).pack())
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(frame)))
    try:
        found = parse_frame(bytes(frame[:cut]))
        decode_step(found) if found.kind != FrameKind.DRAFT else decode_draft(found)
    except FormatError:
        pass


@given(st.binary(max_size=200), st.tuples(*[st.integers(0, 2**32 - 1)] * 3))
def test_random_bodies_are_refused(body, counts):
    for kind, decode in ((FrameKind.STEP, decode_step), (FrameKind.DRAFT, decode_draft)):
        try:
            decode(Frame(kind=kind, counts=counts, body=body))
        except FormatError:
            continue


@pytest.mark.parametrize("change", ["magic", "version", "kind", "long", "round"])
def test_headers_are_checked(change):
    frame = bytearray(Frame(kind=FrameKind.HALT).pack())
    at, value = {
        "magic": (0, 0), "version": (4, 9), "kind": (6, 9), "long": (31, 255), "round": (15, 255),
    }[change]  # fmt: skip
    frame[at] = value
    with pytest.raises(FormatError, match="a frame"):
        parse_frame(bytes(frame))
    with pytest.raises(FormatError, match="header has 32 bytes"):
        parse_frame(b"TWSP")
