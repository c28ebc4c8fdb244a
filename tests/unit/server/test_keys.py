"""Keys: every source, every kind of bad line, and changes while the server runs."""

import hashlib
import logging
import os
from pathlib import Path

import pytest

from twinspark.errors import ConfigError
from twinspark.server.keys import KeyRing, read_digests, read_key_file, read_key_list

FIRST, SECOND, THIRD = "first-secret-key", "second-secret-key", "third-secret-key"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_holds_labels_comments_and_limits(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys",
        f"# of the house\n\nlaptop: {FIRST} requests=2 tokens_per_hour=1000\n{SECOND}\n"
        f"phone: sha256={hashlib.sha256(THIRD.encode()).hexdigest()}\n",
    )
    laptop, plain, phone = read_key_file(path)
    assert (laptop.label, laptop.requests, laptop.tokens_per_hour) == ("laptop", 2, 1000)
    assert plain.label.startswith("key-") and plain.requests is None
    ring = KeyRing(path=path)
    assert [ring.find(k) for k in (FIRST, SECOND, THIRD)] == [laptop, plain, phone]
    assert ring.find("none of them") is None and ring.find("") is None
    for secret in (FIRST, SECOND, THIRD):
        assert secret not in repr((laptop, plain, phone))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("short", "at least 8"),
        ("la bel: secret-key-x", "only requests"),
        ("la/bel: secret-key-x", "a label is"),
        ("secret-key-x unknown=3", "only requests"),
        ("secret-key-x requests=0", "only requests"),
        ("secret-key-x requests=many", "only requests"),
        ("sha256=abc", "64 hexadecimal"),
        ("secret-k\u00e9y-x", "printable ASCII"),
        ("secret-key-x requests=" + "9" * 5000, "only requests"),
        ("secret-key-x requests=0" + "1" * 16, "only requests"),
        ("secret-key-x requests=1 requests=2", "twice"),
        ("requests=50000", "comes first"),
        ("a: requests=1", "comes first"),
        ("a: Tokens_per_hour=1000", "comes first"),
        ("SHA256=" + "a" * 64, "is written sha256="),
        ("sha256:" + "a" * 64, "is written sha256="),
        ("sha256: " + "a" * 64, "is written sha256="),
        ("bob: SHA-256:" + "a" * 64, "is written sha256="),
        ("bob:secret-key-x", "a colon and a space"),
        ("bob-the-builder:", "a key is missing"),
        ("# old\u2028secret-key-x", "only a newline"),
        ("secret-key-x\rsecret-key-y", "only a newline"),
        ("secret-key-x\x0csecret-key-y", "only a newline"),
    ],
)
def test_bad_lines_are_named_without_being_shown(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "keys", f"# one\n{text}\n")
    with pytest.raises(ConfigError, match=words) as found:
        read_key_file(path)
    assert "line 2" in str(found.value) and "secret" not in str(found.value)


def test_a_file_that_others_may_read_or_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key_file(write(tmp_path / "open", FIRST, 0o644))
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "bytes").chmod(0o600)
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_key_file(tmp_path / "bytes")
    long = write(tmp_path / "long", "#" * (2 << 20))
    with pytest.raises(ConfigError, match="longer than"):
        read_key_file(long)


def test_lists_and_digests() -> None:
    keys = read_key_list(f"laptop: {FIRST}, {SECOND},", "the variable")
    assert [key.label for key in keys][0] == "laptop" and len(keys) == 2
    with pytest.raises(ConfigError, match="the variable, key 2") as found:
        read_key_list(f"{FIRST},bad", "the variable")
    assert FIRST not in str(found.value)
    digest = hashlib.sha256(FIRST.encode()).hexdigest()
    ring = KeyRing(read_digests([f"laptop: sha256={digest}"], "--api-key-digest"))
    assert ring.find(FIRST).label == "laptop"
    with pytest.raises(ConfigError, match="read arguments") as found:
        read_digests([FIRST], "--api-key-digest")
    assert FIRST not in str(found.value)


def test_every_digest_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        "twinspark.server.keys.hmac.compare_digest", lambda a, b: compared.append(a) or a == b
    )
    ring = KeyRing(read_key_list(f"{FIRST},{SECOND},{THIRD}", "x"))
    for presented in (FIRST, THIRD, "wrong"):
        compared.clear()
        ring.find(presented)
        assert len(compared) == 3


def test_a_changed_file_is_seen_after_a_second_and_a_bad_one_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    path = write(tmp_path / "keys", f"a: {FIRST}\nb: {SECOND}\n")
    ring = KeyRing(read_key_list(f"fixed: {THIRD}", "x"), path=path, clock=lambda: now[0])
    write(path, f"b: {SECOND}\n")
    assert ring.find(FIRST) is not None  # looked at a moment ago
    now[0] = 1.5
    assert ring.find(FIRST) is None and ring.find(SECOND) is not None
    write(path, "bad")
    now[0] = 3.0
    with caplog.at_level(logging.ERROR):
        assert ring.find(SECOND) is None and ring.find(THIRD) is None
    assert "at least 8" in str(ring.problem) and ring.is_required
    assert "nobody is let in" in caplog.text
    write(path, f"b: {SECOND}\nc: {FIRST}")
    ring.reload()  # as on a signal, without waiting
    assert ring.problem is None and ring.find(FIRST).label == "c"
    path.unlink()
    now[0] = 5.0
    assert ring.find(SECOND) is None and ring.problem is not None


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o660])
def test_a_file_of_a_group_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="its group or to other users; chmod 600"):
        read_key_file(write(tmp_path / "keys", FIRST, mode))


def test_each_key_has_a_value_and_a_label_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"a: {FIRST}\n\na: {SECOND}\n")
    with pytest.raises(ConfigError, match="line 3: the label is also that of .* line 1"):
        read_key_file(path)
    write(path, f"a: {FIRST}\nsha256={hashlib.sha256(FIRST.encode()).hexdigest()}\n")
    with pytest.raises(ConfigError, match="line 2: the key is also that of"):
        read_key_file(path)
    write(path, f"a: {FIRST}\n")
    for fixed in (f"a: {SECOND}", f"b: {FIRST}"):
        with pytest.raises(ConfigError, match="also that of the variable, key 1"):
            KeyRing(read_key_list(fixed, "the variable"), path=path)
    with pytest.raises(ConfigError, match="key 2: the label"):
        read_key_list(f"a: {FIRST}, a: {SECOND}", "the variable")
    assert len(read_key_file(write(path, f"\ufeffa: {FIRST}\r\nb: a:b{SECOND}\r\n"))) == 2


def test_whatever_goes_wrong_no_old_key_stays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    path = write(tmp_path / "keys", f"a: {FIRST}\n")
    ring = KeyRing(path=path, clock=lambda: now[0])

    def fail(path: Path) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr("twinspark.server.keys.read_key_file", fail)
        write(path, f"b: {SECOND}\n")
        now[0] = 2.0
        for _ in range(3):
            assert ring.find(FIRST) is None and ring.find(SECOND) is None
            assert "RuntimeError" in str(ring.problem)
            now[0] += 2.0
        assert caplog.text.count("nobody is let in") == 1
    assert ring.find(FIRST) is None and ring.find(SECOND) is not None  # and it tries again


def test_a_pipe_in_the_place_of_the_file_does_not_hang(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"a: {FIRST}\n")
    ring = KeyRing(path=path)
    path.unlink()
    os.mkfifo(path, 0o600)
    ring.reload()
    assert "no regular file" in str(ring.problem) and ring.find(FIRST) is None
    with pytest.raises(ConfigError, match="no regular file"):
        read_key_file(path)
    with pytest.raises(ConfigError, match="name that no file"):
        read_key_file(Path("a\0b"))


def test_changes_are_logged_as_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "keys", f"a: {FIRST}\nb: {SECOND}\n")
    ring = KeyRing(path=path)
    write(path, f"b: {SECOND}\nc: {THIRD}\n")
    ring.reload()
    ring.reload()
    assert caplog.text.count("2 keys, 1 new, 1 gone") == 1
    write(path, "")
    ring.reload()
    assert "has no key any more" in caplog.text and ring.find(SECOND) is None
    for secret in (FIRST, SECOND, THIRD):
        assert secret not in caplog.text
    caplog.clear()
    KeyRing(path=path)
    assert "has no key" in caplog.text
