"""`twinspark eval` as a process: on the demo pack and on our own server, whole and cut short."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fake_api import MODELS, FakeReply, chat_reply, fake_api, not_there
from tests.live_server import wait_until
from tests.server_process import ServerProcess

from twinspark.evals.catalog import ENTRIES

TWINSPARK = [sys.executable, "-m", "twinspark"]


def evaluated(*arguments: str, json_path: Path, code: int = 0) -> tuple[Any, str, str]:
    """The document of a run, its stdout and its stderr."""
    done = subprocess.run(
        [*TWINSPARK, "eval", *arguments, "--json", str(json_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return json.loads(json_path.read_text()), done.stdout, done.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess([*TWINSPARK, "serve", "--port", "0"])
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


def test_a_pack_here_and_behind_a_url_get_the_same_score(
    server: ServerProcess, tmp_path: Path
) -> None:
    picture = tmp_path / "text.svg"
    here, table, told = evaluated(
        "text", "--cases", "2", "--seed", "3", "--plot", str(picture),
        json_path=tmp_path / "here.json",
    )  # fmt: skip
    there, _, _ = evaluated(
        "text", "--cases", "2", "--seed", "3", "--base-url", server.url,
        json_path=tmp_path / "there.json",
    )  # fmt: skip
    assert list(here["by"]) == ["code", "prose"] and 0 < here["score"] < 1
    assert (here["cases"], here["seed"], here["complete"]) == (2, 3, True)
    assert there["by"] == pytest.approx(here["by"], rel=1e-12)
    for label, figures in here["figures"].items():
        assert there["figures"][label] == pytest.approx(figures)
    assert (here["pack"], there["url"], there["model"]) == ("demo", server.url, here["model"])
    assert "perplexity" in table and "prose" in table
    assert "text: 2 of 2 done" in told
    assert "n = 2, seed 3, demo" in picture.read_text("utf-8")


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [*TWINSPARK, "eval", "drafts", "--cases", "40", "--json", str(path)]
    process = ServerProcess(command)
    try:
        wait_until(lambda: "drafts: 4 of 40 done" in process.said, 60)
        process.process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.close()
    found = json.loads(path.read_text())
    assert (found["complete"], found["ended_by"], found["wanted"]) == (False, "interrupted", 40)
    assert 4 <= found["cases"] < 40 and found["score"] > 0
    assert f"ended after {found['cases']} of 40 cases: interrupted" in process.said
    assert "Traceback" not in process.said


def test_a_server_that_dies_midway(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    server = ServerProcess([*TWINSPARK, "serve", "--port", "0"])
    process: ServerProcess | None = None
    try:
        url = server.wait_ready()
        command = [*TWINSPARK, "eval", "drafts", "--cases", "40", "--base-url", url]
        process = ServerProcess([*command, "--json", str(path)])
        wait_until(lambda: "drafts: 4 of 40 done" in process.said, 120)
        server.close()
        assert process.wait(60) == 1
        found = json.loads(path.read_text())
        assert not found["complete"] and 4 <= found["cases"] < 40
        assert found["score"] > 0 and {"code", "prose"} <= set(found["by"])
        assert f"{url} does not answer any more" in found["ended_by"]
        assert found["ended_by"] in process.said and "Traceback" not in process.said
    finally:
        server.close()
        if process is not None:
            process.close()


def test_what_another_server_cannot_be_measured_by_is_told(tmp_path: Path) -> None:
    def answering(path: str, body: Any) -> FakeReply:
        return FakeReply(MODELS) if path == "/v1/models" else not_there(path)

    with fake_api(answering) as api:
        found, _, told = evaluated(
            "text", "--base-url", api.url, json_path=tmp_path / "out.json", code=1
        )
    assert (found["cases"], found["score"], found["complete"]) == (0, None, False)
    assert "needs completions with echo and logprobs" in found["ended_by"]
    assert found["ended_by"] in told


def test_all_of_a_plain_server_leaves_out_what_it_cannot_be_measured_by(tmp_path: Path) -> None:
    """Chat and usage are all that it has."""

    def answering(path: str, body: Any) -> FakeReply:
        if path == "/v1/chat/completions":
            num_chars = sum(len(str(m.get("content"))) for m in body["messages"])
            return chat_reply("It is 7.", completion_tokens=4, prompt_tokens=num_chars // 4)
        return FakeReply(MODELS) if path == "/v1/models" else not_there(path)

    picture = tmp_path / "all.svg"
    with fake_api(answering) as api:
        found, table, told = evaluated(
            "all", "--cases", "4", "--lengths", "512,1024", "--base-url", api.url,
            "--plot", str(picture), json_path=tmp_path / "out.json",
        )  # fmt: skip
    names = [entry.name for entry in ENTRIES]
    assert [one["name"] for one in found] == names
    for one in found:
        measured = one["name"] not in ("text", "drafts")
        assert one["complete"] == measured and one["cases"] == 4 * measured
        assert one["score"] == (0.0 if measured else None)
        assert one["tokens_a_round"] is None
    assert list(found[0]["by"]) == ["512", "1024"]
    assert "estimated: 4.0" in found[0]["notes"][0] and found[1]["notes"] == []
    assert "drafts: ended after 0 of 4 cases: the server does not say how many rounds" in told
    assert all(name in table for name in names)
    assert {"needle", "count"} <= set(re.findall(r">(\w+)<", picture.read_text("utf-8")))


def test_lengths_over_the_servers_context_are_skipped(tmp_path: Path) -> None:
    def answering(path: str, body: Any) -> FakeReply:
        if path == "/v1/chat/completions":
            return chat_reply("?", completion_tokens=1, prompt_tokens=1000)
        return FakeReply(MODELS) if path == "/v1/models" else not_there(path)

    with fake_api(answering) as api:
        found, _, told = evaluated(
            "needle", "--cases", "3", "--lengths", "600,4000", "--model", "second",
            "--base-url", api.url, json_path=tmp_path / "out.json",
        )  # fmt: skip
    assert found["by"] == {"600": 0.0} and found["cases"] == 3
    assert "length 4000" in found["skipped"][0] and found["skipped"][0] in told
    assert "4096" in found["skipped"][0]
    assert len(found["wrong"]) == 3 and found["wrong"][0]["got"] == "?"
