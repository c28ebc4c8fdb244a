"""How many prompt rows run beside decoding, and whose: from speeds, never changing a reply."""

import statistics
from types import SimpleNamespace

import pytest
from tests.fake_model import ENCODER_GAP, FakeModel, Replies, run_all

from twinspark.engine.checkpoints import Mark
from twinspark.engine.forecast import predict_waits
from twinspark.engine.pace import ANCHOR_ROUNDS, HEADROOM, Pace
from twinspark.engine.pieces import LEAST_ROWS, RowCosts, share_rows
from twinspark.messages import GenerateRequest, Sampling


def prompt(left, *, next_mark=None, apex=None, computed=0, mode="cone"):
    end = computed + left
    mark = Mark(next_mark or end, apex or end)
    return SimpleNamespace(mode=mode, marks=[mark], computed=computed, prompt_left=left)


FLAT = RowCosts(encoder_part=1.0, encoder_gap=0)
HALF = RowCosts(encoder_part=0.5, encoder_gap=10)


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


def test_nothing_decoding_takes_all_rows():
    assert Pace(fair_share=0.5).units_beside(0) is None
    assert Pace(fair_share=0.0).units_beside(3) is None


def test_before_anything_is_known_few_rows_run_and_decoding_is_measured():
    pace = Pace(fair_share=0.5)
    assert pace.units_beside(2) == 0.0 and not pace.wants_decoding(2)
    pace.observe_round(1.0, num_windows=2, units=8)
    assert pace.wants_decoding(2), "what decoding alone takes is not known"
    pace.observe_round(0.2, num_windows=2, units=0)
    assert not pace.wants_decoding(2)
    pace.observe_round(0.4, num_windows=2, units=10)
    assert pace.unit_s == pytest.approx(0.02)


@pytest.mark.parametrize(("share", "ratio"), [(0.5, 1.0), (0.75, 1 / 3), (0.25, 3.0)])
def test_prompt_time_follows_the_share(share, ratio):
    pace = Pace(fair_share=share)
    for _ in range(3):
        pace.observe_round(0.030, num_windows=3, units=0)
        pace.observe_round(0.010, num_windows=0, units=100)
    assert pace.units_beside(3) == pytest.approx(HEADROOM * ratio * 300)


def test_decoding_is_measured_again_now_and_then():
    pace = Pace(fair_share=0.5)
    pace.observe_round(0.03, num_windows=1, units=0)
    for _ in range(ANCHOR_ROUNDS):
        assert not pace.wants_decoding(1)
        pace.observe_round(0.05, num_windows=1, units=20)
    assert pace.wants_decoding(1) and not pace.wants_decoding(0)


def test_rounds_are_known_by_their_number_of_windows():
    pace = Pace(fair_share=0.5)
    pace.observe_round(0.03, num_windows=1, units=0)
    pace.observe_round(0.09, num_windows=4, units=0)
    assert [pace.round_s(n) for n in (1, 2, 4, 8)] == [0.03, 0.03, 0.09, 0.09]
    pace = Pace(fair_share=0.5)
    assert pace.round_s(1) is None
    pace.observe_round(0.09, num_windows=4, units=0)
    assert pace.round_s(1) == 0.09


def test_waits_are_predicted_from_slots_and_pages():
    running = [(4.0, 3), (2.0, 5)]
    queued = [(10.0, 4), (1.0, 4), (1.0, 1)]
    assert predict_waits(running, queued, slots_free=0, pages_free=0) == [2.0, 4.0, 5.0]
    assert predict_waits(running, queued, slots_free=3, pages_free=99) == [0.0, 0.0, 0.0]
    assert predict_waits([], [], slots_free=1, pages_free=1) == []


class TimedModel(FakeModel):
    """Decode rows and prompt rows take time of a clock that only this model moves."""

    def __init__(self, *, row_s, piece_row_s):
        super().__init__(drafts=False)
        self.now_s, self.round_s = 0.0, []
        self._costs = row_s, piece_row_s

    def forward(self, step, caches):
        took = sum(self._seconds(span) for span in step.spans)
        self.now_s += took
        self.round_s.append((took, any(s.prompt_end is not None for s in step.spans)))
        return super().forward(step, caches)

    def _seconds(self, span):
        row_s, piece_row_s = self._costs
        if span.prompt_end is None:
            return row_s * span.count
        cone = max(min(span.first + span.count - (span.prompt_end - ENCODER_GAP), span.count), 0)
        return piece_row_s * (cone + (span.count - cone) / 2)  # half of the layers

    def clock(self):
        return self.now_s


def stream(name, length, limit, first=20):
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(first + n % 250 for n in range(length)),
        sampling=Sampling(temperature=0.0, seed=1, max_tokens=limit, ignore_eos=True),
    )  # fmt: skip


@pytest.mark.parametrize(("row_s", "piece_row_s"), [(0.01, 0.0005), (0.01, 0.002), (0.002, 0.0001)])
def test_streams_keep_half_their_speed_beside_a_long_prompt(make_engine, row_s, piece_row_s):
    model = TimedModel(row_s=row_s, piece_row_s=piece_row_s)
    engine = make_engine(
        model=model, clock=model.clock, prefill_chunk=256, max_context_tokens=2048, lookup=False
    )
    streams = [stream(f"s{n}", 5, 200, first=20 + n) for n in range(3)]
    replies = run_all(engine, [*streams, stream("long", 1600, 1)], arrivals=[0, 0, 0, 20])
    assert replies.last["long"].stats.prompt_tokens == 1600
    beside = [took for took, is_mixed in model.round_s[20:] if is_mixed and took > 3 * row_s]
    alone_s = 3 * row_s
    assert max(beside) <= 2.001 * alone_s, "no round takes more than twice as long"
    assert statistics.mean(beside) > 1.4 * alone_s, "and the prompt is not starved either"


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
    pace = Pace(fair_share=0.5)
    pace.observe_round(0.03, num_windows=1, units=0)
    pace.observe_round(0.06, num_windows=1, units=30)
    usual = pace.units_beside(1)
    pace.observe_round(0.30, num_windows=1, units=0)
    assert pace.units_beside(1) < 2 * usual
    pace.observe_round(0.30, num_windows=1, units=30)
    assert pace.units_beside(1) < usual, "a slow prompt round counts at once"


class LaunchedModel(TimedModel):
    """A forward with prompt rows takes `piece_s` however few they are, as launched kernels do."""

    def __init__(self, *, row_s, piece_row_s, piece_s):
        super().__init__(row_s=row_s, piece_row_s=piece_row_s)
        self._piece_s = piece_s

    def forward(self, step, caches):
        if any(span.prompt_end is not None for span in step.spans):
            self.now_s += self._piece_s
        return super().forward(step, caches)


@pytest.mark.parametrize(("row_s", "piece_row_s", "piece_s"), [
    (0.0005, 0.00005, 0.025), (0.005, 0.0001, 0.03), (0.001, 0.001, 0.02),
])  # fmt: skip
def test_pieces_that_are_never_short_are_large_and_seldom(make_engine, row_s, piece_row_s, piece_s):
    """A prompt gets on and streams keep their half, though one row takes as long as many rounds."""
    model = LaunchedModel(row_s=row_s, piece_row_s=piece_row_s, piece_s=piece_s)
    engine = make_engine(
        model=model, clock=model.clock, prefill_chunk=512, max_context_tokens=4096, lookup=False
    )
    for n in range(3):
        engine.submit(stream(f"s{n}", 5, 3900, first=20 + n))
    replies = Replies()
    for _ in range(20):
        replies.take(engine.step())
    began_s, before = model.now_s, sum(len(t) for t in replies.tokens.values())
    engine.submit(stream("long", 3000, 1))
    gaps = []
    while "long" not in replies.last:
        start_s = model.now_s
        replies.take(engine.step())
        gaps.append(model.now_s - start_s)
    took_s = model.now_s - began_s
    tokens = sum(len(t) for t in replies.tokens.values()) - before
    kept = tokens * row_s / took_s
    work_s = 3000 * piece_row_s  # more than it is: half of most rows' layers
    assert 0.35 < kept < 0.75, "streams keep about their half"
    assert took_s < 5 * work_s + 20 * piece_s
    assert max(gaps) < 3 * piece_s + 2 * 3 * row_s


def test_what_any_piece_takes_is_told_from_its_rows():
    pace = Pace(fair_share=0.5)
    pace.observe_round(0.002, num_windows=1, units=0)
    for _ in range(12):
        units = max(pace.units_beside(1), 8)
        pace.observe_round(0.002 + 0.030 + 0.0001 * units, num_windows=1, units=units)
    assert pace.units_beside(1) == pytest.approx(300, rel=0.1)
    assert pace.wants_decoding(1)
    rounds = 0
    while pace.wants_decoding(1):
        pace.observe_round(0.002, num_windows=1, units=0)
        rounds += 1
    assert rounds * 0.002 >= 0.055, "decoding takes as long as the pieces did"
