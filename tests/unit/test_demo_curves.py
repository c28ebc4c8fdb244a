"""Curves read what the trainer writes, also after a kill and a resume."""

import json

import pytest
from tools.demo.curves import heldout_series, panels, read_log, series


def lines(*points, cut=""):
    return "\n".join(json.dumps(p) for p in points) + "\n" + cut


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    log = tmp_path / "log.jsonl"
    one = {"kind": "train", "length": 2048}
    log.write_text(
        lines(
            one | {"step": 1, "tokens": 10, "loss": 4.0},
            one | {"step": 2, "tokens": 20, "loss": 3.0},
            {"kind": "heldout", "chat": {"loss": 2.5, "right": 0.5}, "code": {"loss": 3.5}},
            one | {"step": 2, "tokens": 20, "loss": 2.9},
            cut='{"kind": "tra',
        )
    )
    found = read_log(log)
    assert series(found["train"], "tokens", "loss", length=2048) == ([10, 20], [4.0, 2.9])
    assert series(found["train"], "tokens", "loss", length=8192) == ([], [])
    assert heldout_series(found["heldout"], "right") == {"chat": ([2e-5], [0.5])}
    assert set(heldout_series(found["heldout"], "loss")) == {"chat", "code"}


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"kind": "start"}\n{broken\n{"kind": "start"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_log(log)


def mixed_log(tmp_path, *, long=32768):
    """As of a run whose steps alternate; 32,768 is the length of a line or of none."""
    log = tmp_path / "log.jsonl"
    lengths = (2048, 2048, 8192, long, 2048)
    log.write_text(
        lines(
            *(
                {
                    "kind": "train", "length": length, "step": n, "tokens": 10**6 * (n + 1),
                    "loss": 4.0 - n, "tokens_s": 400 - 50 * n,
                }
                for n, length in enumerate(lengths)
            )
        )
    )  # fmt: skip
    return read_log(log)


def test_speed_is_one_curve_for_it_is_of_all_lengths_since_the_last_line(tmp_path):
    (panel,) = panels(mixed_log(tmp_path))["speed"]
    assert panel.title == "tokens a second, all lengths since the last line"
    assert list(panel.curves.values()) == [([1.0, 2.0, 3.0, 4.0, 5.0], [400, 350, 300, 250, 200])]


def test_losses_are_by_length_where_the_log_has_lines_of_it(tmp_path):
    (panel,) = panels(mixed_log(tmp_path))["loss"]
    assert not panel.is_joined  # lines of other lengths are between
    assert panel.curves == {
        "2,048 tokens": ([1.0, 2.0, 5.0], [4.0, 3.0, 0.0]),
        "8,192 tokens": ([3.0], [2.0]),
        "32,768 tokens": ([4.0], [1.0]),
    }
    (panel,) = panels(mixed_log(tmp_path, long=8192))["loss"]
    assert list(panel.curves) == ["2,048 tokens", "8,192 tokens"]


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    from tools.demo.curves import draw

    log = tmp_path / "log.jsonl"
    log.write_text(
        lines(
            {"kind": "train", "length": 64, "step": 1, "tokens": 10, "loss": 4.0, "index": 1.0},
            {"kind": "draft", "step": 1, "agree": [0.5, 0.1]},
        )
    )
    made = draw(read_log(log), tmp_path / "out", "svg")
    assert [p.name for p in made] == ["loss.svg", "retrieval.svg", "drafts.svg"]
    assert all(p.read_text().lstrip().startswith("<?xml") for p in made)
