"""One JSON line a request, whatever its end; a log that cannot be written harms nobody."""

import json
import logging
import subprocess
import sys

import httpx
import pytest
from tests.fake_engine import FakeEngine
from tests.live_server import serve_in_thread, wait_until

from twinspark.config.server import ServerConfig
from twinspark.errors import ConfigError
from twinspark.messages import Admitted, EngineStatus, Failed
from twinspark.server import request_log
from twinspark.server.lines_file import LinesFile
from twinspark.server.request_log import RequestLog

SECRET = "a very private question"
BODY = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 6, "seed": 1}


def ask(url: str, **fields: object) -> httpx.Response:
    return httpx.post(url + "/v1/chat/completions", json=BODY | fields, timeout=10)


@pytest.fixture
def engine(small_tokenizer) -> FakeEngine:
    engine = FakeEngine(small_tokenizer)
    engine.status = EngineStatus(running=1, waiting=0, rounds=9, slots_free=3, pool_free_tokens=77)
    return engine


def test_every_end_leaves_one_line_without_text(engine, small_tokenizer, tmp_path) -> None:
    path = tmp_path / "requests.jsonl"
    config = ServerConfig(request_log=str(path))
    babble = engine.babble
    with serve_in_thread(engine, small_tokenizer, config) as live:
        engine.script = lambda request: [
            Admitted(request_id=request.request_id, cached_tokens=3), *babble(request),
        ]  # fmt: skip
        reply = ask(live.url).json()
        engine.script = lambda request: [
            Failed(request_id=request.request_id, kind="busy", message="full", code="queue_full")
        ]
        assert ask(live.url).status_code == 429
        engine.script = lambda request: ([300] for _ in range(10**6))
        engine.round_s = 0.002
        with httpx.stream(
            "POST", live.url + "/v1/chat/completions", timeout=10,
            json=BODY | {"stream": True, "max_tokens": 900},
        ) as stream:  # fmt: skip
            next(stream.iter_lines())
        wait_until(lambda: path.read_text().count("\n") == 3)
    text = path.read_text()
    assert SECRET not in text and "private" not in text
    done, refused, left = map(json.loads, text.splitlines())
    assert done["id"] == reply["id"] and done["finish"] == "length" and done["error"] is None
    assert done["cause"] == "max_tokens" and done["cached"] == 3
    assert done["prompt"] == reply["usage"]["prompt_tokens"]
    assert done["completion"] == reply["usage"]["completion_tokens"] == 6
    assert done["rounds"] == reply["stats"]["rounds"] > 0
    assert done["tokens_per_round"] == round(6 / done["rounds"], 3)
    assert 0 <= done["first_s"] <= done["total_s"] and done["max_tokens"] == 6
    assert (done["slots_free"], done["pool_free"]) == (3, 77)
    assert (refused["error"], refused["error_kind"]) == ("queue_full", "busy")
    assert refused["finish"] is None and refused["first_s"] is None
    assert (left["error"], left["finish"]) == ("client_left", None) and left["completion"] > 0


def test_without_a_file_lines_go_to_the_log(engine, small_tokenizer, caplog) -> None:
    with caplog.at_level(logging.INFO, request_log.__name__):
        with serve_in_thread(engine, small_tokenizer) as live:
            assert ask(live.url).status_code == 200
        lines = [r.getMessage() for r in caplog.records if r.name == request_log.__name__]
    assert len(lines) == 1 and json.loads(lines[0])["finish"] == "length"


def test_old_files_are_kept_up_to_three(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(request_log, "MAX_FILE_BYTES", 200)
    log = RequestLog(str(tmp_path / "r"))
    for number in range(60):
        log.write({"number": number, "fill": "x" * 30})
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "r.1", "r.2", "r.3"]
    assert json.loads((tmp_path / "r").read_text().splitlines()[-1])["number"] == 59


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_moved_away_is_begun_anew(tmp_path, caplog, is_replaced: bool) -> None:
    path, moved = tmp_path / "r", tmp_path / "moved"
    log = RequestLog(str(path))
    log.write({"number": 1})
    path.rename(moved)
    if is_replaced:  # as logrotate's `create` does
        path.touch()
    log.write({"number": 2})
    log.write({"number": 3})
    assert moved.read_text() == '{"number":1}\n'
    assert path.read_text() == '{"number":2}\n{"number":3}\n'
    path.unlink()
    log.write({"number": 4})
    assert path.read_text() == '{"number":4}\n'
    log.close()
    assert caplog.text == ""


def test_lines_go_on_when_the_name_can_be_written_again(tmp_path, caplog) -> None:
    path = tmp_path / "r"
    log = RequestLog(str(path))
    path.unlink()
    path.mkdir()
    log.write({"number": 1})
    log.write({"number": 2})
    assert caplog.text.count("cannot be written: Is a directory") == 1
    path.rmdir()
    log.write({"number": 3})
    log.close()
    assert path.read_text() == '{"number":3}\n'
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and said[1].endswith("is written again; 2 lines were lost")


def test_a_log_that_cannot_be_opened_is_refused_at_the_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot write the request log"):
        RequestLog(str(tmp_path))
    with pytest.raises(ConfigError, match="request_log is empty"):
        ServerConfig(request_log="")


def test_a_full_device_is_told_once_and_closes_quietly(caplog, capsys) -> None:
    log = RequestLog("/dev/full")
    for number in range(300):
        log.write({"number": number, "fill": "x" * 100})
    log.close()
    (record,) = caplog.records
    assert record.exc_info is None and record.getMessage() == (
        "the request log /dev/full cannot be written: No space left on device; its lines are "
        "lost until it can be"
    )
    assert capsys.readouterr() == ("", "")


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path, caplog) -> None:
    """In a process of its own, whose files may only grow to a few lines."""
    path = tmp_path / "r"
    script = f"""
import resource, sys
from twinspark.server.request_log import RequestLog
log = RequestLog({str(path)!r})
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (70, most))
for number in range(9):
    log.write({{"number": number, "fill": "x" * 5}})
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.write({{"number": 9}})
log.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1, 9]
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2
    assert "cannot be written: File too large" in done.stderr
    assert "7 lines were lost" in done.stderr


def test_a_failing_log_warns_once_and_fails_no_request(
    engine, small_tokenizer, tmp_path, caplog, monkeypatch
) -> None:
    config = ServerConfig(request_log=str(tmp_path / "requests.jsonl"))

    def full(self: object, line: bytes) -> None:
        raise OSError(28, "No space left on device")

    with serve_in_thread(engine, small_tokenizer, config) as live:
        with monkeypatch.context() as patch:
            patch.setattr(LinesFile, "_append", full)
            assert [ask(live.url).status_code for _ in range(3)] == [200] * 3
        assert ask(live.url).status_code == 200
    warned = [r for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(warned) == 1
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 1
