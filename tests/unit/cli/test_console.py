"""Lines for people: capacity at the start, refusals before long work."""

from dataclasses import replace

import pytest

from twinspark.cli.console import LoadingLine, check_writable, describe_ready
from twinspark.errors import ConfigError
from twinspark.messages import Loading, Ready

READY = Ready(
    model_name="m", vocab_size=9, max_context_tokens=32768, num_slots=4, load_seconds=2.34,
    pool_tokens=131072, page_tokens=256,
)  # fmt: skip


def test_the_capacity_is_in_tokens():
    assert describe_ready(READY, "demo") == (
        "ready after 2.3 s: model demo, 4 slots, context 32768 tokens, "
        "pool 131072 tokens in pages of 256"
    )
    assert describe_ready(replace(READY, num_ranks=2), "demo").endswith("pages of 256, 2 ranks")


def test_no_progress_is_shown_after_the_end_of_its_line(capsys):
    line = LoadingLine()
    line.show(Loading(phase="loading weights", fraction=0.1))
    line.close()
    line.show(Loading(phase="loading weights", fraction=0.9))
    assert capsys.readouterr().err == "twinspark: loading weights  10%\n"


def test_an_output_that_cannot_be_written_names_its_option(tmp_path):
    check_writable(tmp_path / "new.json", option="--json")
    with pytest.raises(ConfigError, match="cannot write --json: the folder .* does not exist"):
        check_writable(tmp_path / "none" / "new.json", option="--json")
    with pytest.raises(ConfigError, match="cannot write --out: .* is a folder"):
        check_writable(tmp_path)
