"""Batches and carried archives of the demo model's data: nothing cut, nothing lost, repeatable."""

import json
from collections import Counter

import numpy as np
import pytest
from tools.demo import batches, carry, curriculum, data

# --- batches ---


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Made-up tokens: a stream of three kinds, and whole documents with targets and copies."""
    folder = tmp_path_factory.mktemp("packed")
    r = np.random.default_rng(3)
    for name in ("code", "docs"):
        documents = [np.append(0, r.integers(3, 4000, r.integers(20, 90))) for _ in range(200)]
        np.concatenate(documents).astype(np.uint16).tofile(folder / f"{name}.train.bin")
    ids, loss, find = [], [], []
    for n in range(300):
        size = int(r.integers(8, 60))
        ids += [0, *([n % 3000 + 3] * (size - 2)), 1]
        loss += [0] * (size // 2) + [1] * (size - size // 2)
        find += [-1] * (size - 2) + [2, -1]
    np.array(ids, np.uint16).tofile(folder / "tasks.train.bin")
    np.array(loss, np.uint8).tofile(folder / "tasks.train.loss.bin")
    np.array(find, np.int32).tofile(folder / "tasks.train.find.bin")
    return folder


SHARES = {"code": 0.5, "docs": 0.2, "tasks": 0.3}


def test_no_conversation_is_cut(packed):
    drawn = batches.Batches(packed, "train", "cpu", seed=1).draw("tasks", 200, 127)
    assert drawn.ids.shape == drawn.loss.shape == drawn.find.shape == (200, 128)
    filled = 0
    for ids, loss, find, _ in zip(*drawn, strict=True):
        used = int((ids != 2).sum())
        filled += used
        assert (ids[used:] == 2).all() and not loss[used:].any() and (find[used:] == -1).all()
        begins, ends = (ids == 0).nonzero()[:, 0], (ids == 1).nonzero()[:, 0]
        assert len(begins) == len(ends) and ids[0] == 0 and ends[-1] == used - 1
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            assert len(set(ids[begin + 1 : end].tolist())) == 1
            assert find[end - 1] == begin + 2 and ids[begin + 2] == ids[end - 1]
            assert loss[end] and not loss[begin]
    assert filled > 0.9 * drawn.ids.numel()


def test_an_epoch_gives_every_conversation_once(packed):
    drawer = batches.Batches(packed, "train", "cpu", seed=1)
    windows = len(drawer._load("tasks", 127).ids)
    first = drawer.draw("tasks", windows, 127).ids
    marks = first[first > 2].unique()
    assert len(marks) == 300
    second = drawer.draw("tasks", windows, 127).ids
    assert not (first == second).all()
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist()))


def test_streams_are_cut_everywhere_and_a_third_begins_a_document(packed):
    drawn = batches.Batches(packed, "train", "cpu", seed=1).draw("code", 400, 30)
    aligned = float((drawn.ids[:, 0] == 0).float().mean())
    assert 0.25 < aligned < 0.45
    assert not drawn.loss[:, 0].any() and not drawn.loss[drawn.ids == 0].any()
    assert drawn.loss[:, 1:][drawn.ids[:, 1:] != 0].all()
    whole = np.fromfile(packed / "code.train.bin", np.uint16)
    seen = set(np.unique(drawn.ids.numpy()))
    assert len(seen) > 0.7 * len(np.unique(whole))


def test_windows_know_their_source(packed):
    drawn = batches.Batches(packed, "train", "cpu", seed=1).mixed(20, 63, SHARES)
    names = (*batches.STREAMS, *batches.WHOLE)
    counts = Counter(names[n] for n in drawn.source.tolist())
    assert counts == {name: 20 * share for name, share in SHARES.items()}
    tasks = drawn.source == names.index("tasks")
    assert (drawn.find[tasks] >= 0).any(1).all() and (drawn.find[~tasks] == -1).all()


def test_thinning_leaves_whole_documents_spread_evenly_and_the_first_folder_alone(packed, tmp_path):
    for path in packed.glob("tasks*"):
        (tmp_path / path.name).hardlink_to(path)
    whole = batches.read_tokens(packed, "tasks", "train")
    most = len(whole[0]) * 0.6
    left = data.thin(tmp_path, "tasks", most)
    assert left == pytest.approx(most, rel=0.05) and left <= most
    assert data.thin(tmp_path, "tasks", most) == left
    ids, loss, find = batches.read_tokens(tmp_path, "tasks", "train")
    begins = np.flatnonzero(ids == 0)
    assert begins[0] == 0 and (ids[begins[1:] - 1] == 1).all() and ids[-1] == 1
    numbers = ids[begins + 1].astype(int) - 3  # of a document of the first file
    assert len(numbers) in range(170, 181) and np.diff(numbers).max() <= 3
    copied = np.flatnonzero(find >= 0)
    assert loss[-1] == 1 and (find[copied] == 2).all() and (ids[copied + 1] == 1).all()
    assert data.thin(tmp_path, "tasks", most * 2) == left == len(ids)
    assert len(batches.read_tokens(packed, "tasks", "train")[0]) == len(whole[0])


def test_shares_hold_and_the_same_seed_gives_the_same_batches(packed):
    one, two = (batches.Batches(packed, "train", "cpu", seed=4) for _ in range(2))
    counts = Counter()
    for _ in range(40):
        a, b = one.mixed(5, 63, SHARES), two.mixed(5, 63, SHARES)
        assert all((x == y).all() for x, y in zip(a, b, strict=True))
        assert a.ids.shape == (5, 64)
    counts = {key: value / 200 for key, value in one.state()["drawn"].items()}
    assert counts == pytest.approx({f"{k}.63": v for k, v in SHARES.items()}, abs=0.01)
    other = batches.Batches(packed, "train", "cpu", seed=5).mixed(5, 63, SHARES)
    assert not (other.ids == two.mixed(5, 63, SHARES).ids).all()


def test_draws_go_on_where_they_were(packed):
    one = batches.Batches(packed, "train", "cpu", seed=4)
    for length in (63, 31, 63):
        one.mixed(7, length, SHARES)
    state = json.loads(json.dumps(one.state()))
    two = batches.Batches(packed, "train", "cpu", seed=4)
    two.restore(state)
    for length in (31, 63, 31):
        a, b = one.mixed(7, length, SHARES), two.mixed(7, length, SHARES)
        assert all((x == y).all() for x, y in zip(a, b, strict=True))


def test_missing_and_too_long_sources_are_named(packed):
    drawer = batches.Batches(packed, "train", "cpu", seed=4)
    with pytest.raises(ValueError, match="no file for 'prose'"):
        drawer.mixed(1, 31, {"prose": 1.0})
    with pytest.raises(ValueError, match="no document of tasks fits windows of 4"):
        drawer.mixed(1, 4, {"tasks": 1.0})
    with pytest.raises(FileNotFoundError, match=r"code\.heldout\.bin"):
        batches.Batches(packed, "heldout", "cpu", seed=4)


# --- archives to carry ---


def test_data_come_out_of_the_parts_as_they_went_in(packed, tmp_path):
    demo, out, back = tmp_path / "demo", tmp_path / "out", tmp_path / "back"
    (demo / "data").mkdir(parents=True)
    (demo / "checkpoint").mkdir()
    for path in packed.iterdir():
        (demo / "data" / path.name).write_bytes(path.read_bytes())
    (demo / "checkpoint" / "tokenizer.json").write_text("{}")
    parts = carry.pack(demo, out, limit=20_000, window=1 << 16)
    assert len(parts) > 1 and all(p.stat().st_size <= 20_000 for p in parts)
    assert carry.unpack(out, back) > 0
    for path in carry.contents(demo):
        assert (back / path.relative_to(demo)).read_bytes() == path.read_bytes()
    names = [p.name for p in carry.contents(demo)]
    assert names[0] == "code.train.bin" and names[-1] == "tokenizer.json"
    raw = bytearray(parts[1].read_bytes())
    raw[100] ^= 1
    parts[1].write_bytes(raw)
    with pytest.raises(ValueError, match="damaged"):
        carry.unpack(out, back)
    parts[1].unlink()
    with pytest.raises(ValueError, match="missing"):
        carry.unpack(out, back)


def test_the_shares_of_the_curriculum_name_what_is_packed():
    for length, shares in curriculum.SHARES.items():
        assert sum(shares.values()) == pytest.approx(1.0)
        longest = {"needle4k": 4096, "needle16k": 16384, "needle32k": 32768}
        assert all(longest.get(name, 0) <= 2 * length for name in shares)
        assert set(shares) <= {*batches.STREAMS, *batches.WHOLE}
