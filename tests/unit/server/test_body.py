import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinspark.server.body import ShapeScan, _parse_object
from twinspark.server.errors import ApiError

NASTY = st.text(alphabet='ab"\\[]{}:,\u00e9\U0001f389\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NASTY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY, inner, max_size=4),
    max_leaves=20,
)


def scan(data: bytes, cuts: list[int]) -> ShapeScan:
    found = ShapeScan()
    edges = [0, *sorted(cuts), len(data)]
    for begin, end in zip(edges, edges[1:], strict=False):
        found.feed(data[begin:end])
    return found


def depth(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def members(value: object) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(members, value.values()))
    return sum(map(members, value)) if isinstance(value, list) else 0


@given(VALUES, st.data())
def test_depth_and_members_of_json_cut_anywhere(value: object, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans())).encode()
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    for places in (cuts, list(range(len(text)))):
        found = scan(text, places)
        assert found.max_depth == depth(value)
        assert found.members == members(value)


@given(st.binary(max_size=200))
def test_anything_else_gives_bounded_figures(data: bytes) -> None:
    found = scan(data, [len(data) // 2])
    assert found.max_depth <= len(data) and found.containers <= len(data)


@pytest.mark.parametrize("piece", [b'"' + b'\\"' * 500_000, b"[[1]]," * 150_000, b'"a"' * 300_000])
def test_hostile_pieces_cost_linear_time(piece: bytes) -> None:
    begin = time.process_time()
    ShapeScan().feed(piece)
    # About 0.05 s for a megabyte here; a quadratic scan would take minutes.
    assert time.process_time() - begin < 2


def test_a_long_key_is_not_echoed() -> None:
    key = "k" * 5_000_000
    with pytest.raises(ApiError, match="written twice") as caught:
        _parse_object(f'{{"{key}": 1, "{key}": 2}}'.encode(), members=2)
    assert len(caught.value.message) < 200 and caught.value.param == key[:60]


@pytest.mark.parametrize("value", [2**64 + 1, 2**70 + 5, -(2**63) - 1, 10**30, 2**63, -5])
def test_integers_of_any_length_stay_whole(value):
    data = json.dumps({"seed": value, "text": "1" * 40, "list": [value]}).encode()
    assert _parse_object(data, 3) == {"seed": value, "text": "1" * 40, "list": [value]}


def test_an_integer_of_thousands_of_digits_is_refused():
    with pytest.raises(ApiError, match="infinity"):
        _parse_object(b'{"seed": ' + b"9" * 5000 + b"}", 1)
