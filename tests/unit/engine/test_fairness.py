"""How many prompt rows run beside decoding, and whose: from speeds, never changing a reply."""

from types import SimpleNamespace

import pytest
from tests.fake_model import ENCODER_GAP, HISTORY, FakeModel, Replies, run_all

from twinspark.engine.checkpoints import Mark
from twinspark.engine.cost_probe import CostProbe
from twinspark.engine.forecast import predict_waits
from twinspark.engine.pace import (
    ANCHOR_ROUNDS,
    GROWTH,
    HEADROOM,
    LAYER_ROUNDS,
    MOST_PIECE_S,
    Pace,
)
from twinspark.engine.pieces import LEAST_ROWS, RowCosts, share_rows
from twinspark.messages import GenerateRequest, Sampling

LAYERS = FakeModel().config.num_hidden_layers


def observe(pace, seconds, num_windows, *, units):
    """A round with a whole piece."""
    piece_s = pace.observe_layers(seconds, num_windows=num_windows)
    if piece_s is not None:
        pace.observe_piece(piece_s, units=units, depth=8)


def prompt(left, *, next_mark=None, apex=None, computed=0, mode="cone"):
    end = computed + left
    mark = Mark(next_mark or end, apex or end)
    return SimpleNamespace(mode=mode, marks=[mark], computed=computed, prompt_left=left)


FLAT = RowCosts(encoder_part=1.0, encoder_gap=0, num_layers=8)
HALF = RowCosts(encoder_part=0.5, encoder_gap=10, num_layers=8)


def new_pace(share=0.5, num_layers=8):
    return Pace(fair_share=share, num_layers=num_layers)


@pytest.mark.parametrize(
    ("lefts", "most", "counts"),
    [
        ([], 8, []),
        ([100], 8, [8]),
        ([3], 8, [3]),
        ([100, 100], 8, [8, 0]),  # equal: the older one
        ([100, 3], 8, [5, 3]),
        ([100, 3, 2], 8, [4, 2, 2]),  # half is the oldest's
        ([100, 50, 2], 9, [5, 2, 2]),
        ([2, 100, 3], 8, [2, 3, 3]),
    ],
)
def test_the_oldest_has_half_and_short_ones_the_rest(lefts, most, counts):
    assert share_rows([prompt(n) for n in lefts], FLAT, most=most, units=None) == counts


def test_a_piece_ends_at_the_next_mark():
    prompts = [prompt(100, next_mark=5), prompt(60)]
    assert share_rows(prompts, FLAT, most=64, units=None) == [5, 59]


@pytest.mark.parametrize(("units", "rows"), [(0.0, 8), (3.0, 8), (20.0, 20), (20.9, 20), (500, 64)])
def test_units_bound_the_rows_but_some_always_run(units, rows):
    assert share_rows([prompt(100)], FLAT, most=64, units=units) == [rows]


def test_the_least_rows_are_shared_too():
    counts = share_rows([prompt(100), prompt(50), prompt(9)], FLAT, most=64, units=0.0)
    assert counts == [LEAST_ROWS // 2, 0, LEAST_ROWS // 2]
    assert sum(share_rows([prompt(100), prompt(2)], FLAT, most=3, units=0.0)) == 3


def test_rows_of_the_encoder_alone_cost_less():
    session = prompt(50)  # the cone begins at 40
    assert HALF.units(session, 0, 50) == 40 * 0.5 + 10
    assert HALF.units(session, 35, 10) == 5 * 0.5 + 5
    assert HALF.units(prompt(50, mode="full"), 0, 50) == 50
    assert HALF.rows(session, 50, 10.0) == 20
    assert HALF.rows(session, 50, 22.0) == 42
    assert share_rows([session], HALF, most=64, units=24.0) == [44]


def test_layers_that_no_row_runs_are_not_counted():
    session = prompt(50)  # the cone begins at 40
    assert [HALF.depth(session, 0, n) for n in (1, 40, 41)] == [4, 4, 8]
    assert HALF.depth(prompt(50, mode="full"), 0, 1) == 8
    assert FLAT.depth(prompt(50), 0, 1) == 8


def test_nothing_decoding_takes_all_rows_and_layers():
    for pace, windows in ((new_pace(), 0), (new_pace(0.0), 3)):
        pace.observe_round(0.1, num_windows=windows)
        observe(pace, 0.3, windows, units=10)
        for number in (pace.units_beside, pace.rows_beside, pace.layers_s):
            assert number(windows) is None


def test_before_anything_is_known_few_rows_run_and_decoding_is_measured():
    pace = new_pace()
    assert pace.units_beside(2) == pace.layers_s(2) == 0.0 and not pace.wants_decoding(2)
    observe(pace, 1.0, 2, units=8)
    assert pace.wants_decoding(2), "what decoding alone takes is not known"
    pace.observe_round(0.2, num_windows=2)
    assert not pace.wants_decoding(2)
    observe(pace, 0.4, 2, units=10)
    assert pace.unit_s == pytest.approx(0.02)


@pytest.mark.parametrize(("share", "ratio"), [(0.5, 1.0), (0.75, 1 / 3), (0.25, 3.0)])
def test_prompt_time_follows_the_share(share, ratio):
    pace = new_pace(share)
    for _ in range(3):
        pace.observe_round(0.030, num_windows=3)
        observe(pace, 0.010, 0, units=100)
    assert pace.layers_s(3) == pytest.approx(HEADROOM * ratio * 0.030)
    layer_s = max(LAYER_ROUNDS, HEADROOM * ratio) * 0.030
    assert pace.rows_beside(3) == pytest.approx(8 * layer_s / 0.0001, abs=1)


def test_a_piece_takes_no_longer_than_others_may_wait_and_grows_by_and_by():
    pace = new_pace()
    pace.observe_round(0.030, num_windows=1)
    observe(pace, 0.001, 0, units=10)
    assert pace.units_beside(1) == GROWTH * 10
    for units in (1e4, *[1000] * 9):
        pace.observe_piece(0.05 + 0.0001 * units, units=units, depth=8)
    assert pace.units_beside(1) == pytest.approx((MOST_PIECE_S - 0.05) / 0.0001, rel=0.01)
    assert pace.rows_beside(1) == pytest.approx((8 * LAYER_ROUNDS * 0.03 - 0.05) / 0.0001, abs=9)


def test_whole_pieces_share_a_rounds_pass_where_few_rows_cost_little():
    pace = new_pace()
    pace.observe_round(0.030, num_windows=1)
    for units in (100, 200, 100, 200):
        pace.observe_piece(0.001 + 0.0001 * units, units=units, depth=8)
    assert pace.units_beside(1) == pytest.approx((HEADROOM * 0.03 - 0.001) / 0.0001, rel=0.01)
    assert pace.rows_beside(1) is None
    assert pace.piece_s(pace.units_beside(1), 8) <= pace.layers_s(1) * 1.0001


def test_while_all_pieces_were_as_large_another_tells_what_part_of_their_time_is_the_rows():
    for units, wanted in ((20, 40), (1000, 500)):
        pace = new_pace()
        pace.observe_round(0.1, num_windows=1)
        for _ in range(4):
            pace.observe_piece(0.1, units=units, depth=8)
        assert pace.piece_s(units, 8) is None
        assert pace.units_beside(1) == wanted


def test_decoding_is_measured_again_now_and_then():
    pace = new_pace()
    pace.observe_round(0.03, num_windows=1)
    for _ in range(ANCHOR_ROUNDS):
        assert not pace.wants_decoding(1)
        observe(pace, 0.05, 1, units=20)
    assert pace.wants_decoding(1) and not pace.wants_decoding(0)


def test_rounds_are_known_by_their_number_of_windows():
    pace = new_pace()
    pace.observe_round(0.03, num_windows=1)
    pace.observe_round(0.09, num_windows=4)
    assert [pace.round_s(n) for n in (1, 2, 4, 8)] == [0.03, 0.03, 0.09, 0.09]
    pace = new_pace()
    assert pace.round_s(1) is None
    pace.observe_round(0.09, num_windows=4)
    assert pace.round_s(1) == 0.09


def test_waits_are_predicted_from_slots_and_pages():
    running = [(4.0, 3), (2.0, 5)]
    queued = [(10.0, 4), (1.0, 4), (1.0, 1)]
    assert predict_waits(running, queued, slots_free=0, pages_free=0) == [2.0, 4.0, 5.0]
    assert predict_waits(running, queued, slots_free=3, pages_free=99) == [0.0, 0.0, 0.0]
    assert predict_waits([], [], slots_free=1, pages_free=1) == []


class TimedModel(FakeModel):
    """Decode rows and layers of prompt rows take time of a clock that only this model moves.

    Layers of prompt rows take `layer_s` however few they are, as those of a GPU do that waits for
    the host.
    """

    def __init__(self, *, row_s, piece_row_s, piece_s=0.0):
        super().__init__(drafts=False, context=16384)
        self.now_s = 0.0
        self._row_s = row_s
        self._layer_row_s, self._layer_s = (x / LAYERS for x in (piece_row_s, piece_s))

    def advance(self, begun, end=None):
        for layer in range(begun.next_layer, LAYERS if end is None else end):
            seconds = [self._seconds(span, layer) for span in begun.step.spans]
            self.now_s += sum(seconds)
            spans = zip(begun.step.spans, seconds, strict=True)
            if any(s.prompt_end is not None and took > 0 for s, took in spans):
                self.now_s += self._layer_s
        super().advance(begun, end)

    def _seconds(self, span, layer):
        if span.prompt_end is None:
            return self._row_s * span.count / LAYERS
        if layer < LAYERS // 2 or span.mode == "full":
            return self._layer_row_s * span.count
        inside = span.first + span.count - (span.prompt_end - ENCODER_GAP)
        return self._layer_row_s * max(min(inside, span.count), 0)

    def clock(self):
        return self.now_s


def stream(name, length, limit, first=20):
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(first + n % 250 for n in range(length)),
        sampling=Sampling(temperature=0.0, seed=1, max_tokens=limit, ignore_eos=True),
    )  # fmt: skip


def beside_a_long_prompt(engine, model, length, *, stream_length=5):
    """Three streams that never end; the gaps of their rounds while the prompt runs, and its time.

    Gives also what part of the time was theirs.
    """
    for n in range(3):
        engine.submit(stream(f"s{n}", stream_length, 9000, first=20 + n))
    replies = Replies()
    for _ in range(20):
        replies.take(engine.step())
    began_s, last_s, gaps = model.now_s, model.now_s, []
    before = sum(map(len, replies.tokens.values()))
    engine.submit(stream("long", length, 1))
    while "long" not in replies.last:
        seen = len(replies.tokens["s0"])
        replies.take(engine.step())
        if len(replies.tokens["s0"]) > seen:
            gaps.append(model.now_s - last_s)
            last_s = model.now_s
    took_s = model.now_s - began_s
    tokens = sum(map(len, replies.tokens.values())) - before
    return gaps, took_s, tokens * model._row_s / took_s


@pytest.mark.parametrize(("row_s", "piece_row_s", "piece_s"), [
    (0.01, 0.0005, 0.0), (0.01, 0.002, 0.0), (0.002, 0.0001, 0.0),
    (0.0005, 0.00005, 0.0025), (0.002, 0.0001, 0.03), (0.004, 0.0002, 0.04),
])  # fmt: skip
def test_gaps_are_short_and_streams_keep_half_beside_a_long_prompt(
    make_engine, row_s, piece_row_s, piece_s
):
    """Also where any piece takes as long as several rounds, however few rows it has."""
    model = TimedModel(row_s=row_s, piece_row_s=piece_row_s, piece_s=piece_s)
    engine = make_engine(
        model=model, clock=model.clock, prefill_chunk=512, max_context_tokens=16384, lookup=False
    )
    gaps, took_s, kept = beside_a_long_prompt(engine, model, 8000)
    assert max(gaps) <= 3 * 3.01 * row_s, "no gap is longer than three rounds"
    assert 0.45 < kept < 0.65, "streams keep their half, and no more"
    least_s = 8000 / 512 * piece_s / 2 + 8000 * piece_row_s / 2  # alone, half of the layers
    assert took_s < 4 * least_s


def measure_pieces(engine, model):
    """Prices of pieces, as an engine gets them at its start."""
    probe = CostProbe(
        engine._runner, engine._scheduler.store.pool, text_ids=range(20, 220), slots=4,
        context_tokens=16384, max_rows=1, prompt_rows=engine.config.prompt_rows, block=0,
        history_tokens=HISTORY, timer=model.clock, clock=model.clock,
    )  # fmt: skip
    engine._scheduler.expect_pieces(probe.run().table.pieces())


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(("row_s", "piece_row_s", "piece_s", "chunk"), [
    (0.01, 0.0016, 0.0, 128), (0.01, 0.0016, 0.0, 32), (0.027, 0.0016, 0.01, 128),
    (0.0133, 0.0016, 0.02, 128),
    (0.0005, 0.00005, 0.0025, 512), (0.002, 0.0001, 0.03, 512), (0.004, 0.0001, 0.05, 4096),
    (0.002, 0.00002, 0.05, 4096),
])  # fmt: skip
def test_the_first_long_prompt_is_as_fast_as_the_next(
    make_engine, row_s, piece_row_s, piece_s, chunk, is_known
):
    """Rows take the time, as on a CPU, or pieces do; prices were measured, or must be learned.

    The streams' own prompts run first, in one piece that is larger than what fits beside streams.
    """
    model = TimedModel(row_s=row_s, piece_row_s=piece_row_s, piece_s=piece_s)
    engine = make_engine(
        model=model, clock=model.clock, prefill_chunk=chunk, max_context_tokens=16384, lookup=False,
        prefix_reuse=False,
    )  # fmt: skip
    if is_known:
        measure_pieces(engine, model)
    found = []
    for _ in range(2):
        found.append(beside_a_long_prompt(engine, model, 6000, stream_length=40))
        for n in range(3):
            engine.cancel(f"s{n}")
        while engine.has_work:
            engine.step()
    (gaps, first_s, kept), (_, second_s, _) = found
    round_s, layer_s = 3 * row_s, 2.2 * piece_s / LAYERS  # of a layer, half is work
    assert max(gaps) <= max(3.01 * round_s, round_s + layer_s)
    assert 0.45 < kept < 0.65, "streams keep their half, and no more"
    if is_known:
        assert first_s < 1.1 * second_s
    else:
        assert first_s < 1.25 * second_s + 4 * piece_s, "a few pieces tell what others take"


def test_layers_that_take_longer_than_their_share_are_made_good(make_engine):
    """Even a single one, of a few rows, takes longer than a round: decoding is paid in between."""
    model = TimedModel(row_s=0.001, piece_row_s=0.001, piece_s=0.06)
    engine = make_engine(
        model=model, clock=model.clock, prefill_chunk=512, max_context_tokens=16384, lookup=False
    )
    gaps, took_s, kept = beside_a_long_prompt(engine, model, 2000)
    assert 0.45 < kept < 0.6
    longest = sorted(gaps)[-4]  # first pieces tell what a row takes
    assert longest < 0.003 + 2.2 * 0.06 / LAYERS, "half of a layer's time is work"
    assert took_s < 5 * 2000 * 0.001


def test_prompts_alone_take_whole_chunks(make_engine):
    model = TimedModel(row_s=0.01, piece_row_s=0.01)
    engine = make_engine(model=model, clock=model.clock, prefill_chunk=100, max_context_tokens=400)
    run_all(engine, [stream("a", 301, 2)])
    assert [n for call in model.calls for _, _, n, end in call if end is not None] == [100] * 3


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_shares_and_speeds_never_change_a_reply(make_engine, share):
    requests = [stream(f"r{n}", 3 + 40 * n, 30, first=20 + n) for n in range(5)]
    model = TimedModel(row_s=0.01, piece_row_s=0.003)
    engine = make_engine(
        model=model, clock=model.clock, prefill_chunk=64, max_context_tokens=512, fair_share=share
    )
    replies = run_all(engine, requests, arrivals=[0, 0, 3, 9, 11])
    for request in requests:
        alone = run_all(make_engine(model=FakeModel(drafts=False)), [request])
        assert replies.summary(request.request_id) == alone.summary(request.request_id)


def test_a_long_prompt_goes_on_under_a_stream_of_short_ones(make_engine):
    model = TimedModel(row_s=0.01, piece_row_s=0.01)
    engine = make_engine(
        model=model, clock=model.clock, slots=3, prefill_chunk=16, max_context_tokens=1024
    )
    engine.submit(stream("talk", 2, 900))
    engine.submit(stream("long", 400, 1))
    replies, number = Replies(), 0
    for _ in range(1500):  # eight rows take as long as eight rounds, which come between
        if engine.status.waiting == 0:
            engine.submit(stream(f"s{number}", 20, 1, first=30 + number % 50))
            number += 1
        replies.take(engine.step())
        if "long" in replies.last:
            break
    assert "long" in replies.last and number > 3


def test_one_slow_round_is_not_taken_for_the_usual_one():
    pace = new_pace()
    pace.observe_round(0.03, num_windows=1)
    observe(pace, 0.06, 1, units=30)
    usual = pace.rows_beside(1)
    pace.observe_round(0.30, num_windows=1)
    assert pace.rows_beside(1) < 2 * usual
    observe(pace, 0.30, 1, units=30)
    assert pace.rows_beside(1) < usual, "a slow prompt round counts at once"


def test_what_any_piece_takes_is_told_from_its_rows():
    pace = new_pace()
    pace.observe_round(0.002, num_windows=1)
    for _ in range(12):
        units = max(min(pace.units_beside(1), pace.rows_beside(1) or 8), 8)
        observe(pace, 0.002 + 0.030 + 0.0001 * units, 1, units=units)
    assert pace.rows_beside(1) == pytest.approx(300, rel=0.1), "as long again as an empty one"
    assert pace.piece_s(1000, 8) == pytest.approx(0.130, rel=0.1)
    assert pace.wants_decoding(1)
    rounds = 0
    while pace.wants_decoding(1):
        pace.observe_round(0.002, num_windows=1)
        rounds += 1
    assert rounds * 0.002 >= 0.055, "decoding takes as long as the pieces did"
