"""Tokenizer: special tokens by text, safe encoding, the byte table, refusals."""

import json
import threading
import time

import pytest
from tests.small_tokenizer import DSML, EXTRA, edited, small_tokenizer_json

from twinspark.errors import FormatError
from twinspark.text.tokenizer import (
    BOS,
    END_THINK,
    EOS,
    LONG_TEXT,
    REQUIRED,
    THINK,
    Tokenizer,
    byte_alphabet,
)

SAMPLES = (
    "",
    "def fib(n):\n    return n\n",
    "  two  spaces\t\ttabs \r\n",
    "\u65e5\u672c\u8a9e \U0001f469\u200d\U0001f680 e\u0301 \U0001f1eb\U0001f1f7",
    "123456 1,000.5 \x00\x07",
)


def test_ids_of_the_real_file(real_tokenizer: Tokenizer, golden: dict) -> None:
    assert real_tokenizer.vocab_size == 129280
    for text, token_id in golden["meta"]["special_token_ids"].items():
        assert real_tokenizer.special_id(text) == token_id
        assert real_tokenizer.token_bytes(token_id) == text.encode()
    assert real_tokenizer.bos_id == 0
    assert real_tokenizer.eos_id == 1
    assert real_tokenizer.pad_id == 2
    assert real_tokenizer.system_id == 128799
    assert real_tokenizer.user_id == 128803
    assert real_tokenizer.assistant_id == 128804
    assert real_tokenizer.think_id == 128821
    assert real_tokenizer.end_think_id == 128822
    assert real_tokenizer.latest_reminder_id == 128828


def test_reserved_ids_of_the_real_file(real_tokenizer: Tokenizer) -> None:
    expected = [*range(128000, 128799), *range(128847, 129271), 129279]
    assert real_tokenizer.reserved_ids == tuple(expected)


def test_ids_of_a_small_file(small_tokenizer: Tokenizer) -> None:
    assert small_tokenizer.vocab_size == 360
    assert small_tokenizer.bos_id == len(REQUIRED)  # the trainer got them in reverse, after pad
    assert small_tokenizer.special_id("<nothing>") is None
    assert small_tokenizer.reserved_ids == (small_tokenizer.special_id(EXTRA[2]),)


@pytest.mark.parametrize("name", ["real_tokenizer", "small_tokenizer"])
@pytest.mark.parametrize("text", SAMPLES)
def test_bytes_of_ids_are_the_text(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode_plain(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_full(text) == ids


@pytest.mark.parametrize("name", ["real_tokenizer", "small_tokenizer"])
def test_no_special_id_out_of_plain_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    special_ids = set(tokenizer.specials.values())
    for text, token_id in tokenizer.specials.items():
        for around in (text, f"a {text}b", text + text):
            ids = tokenizer.encode_plain(around)
            assert not special_ids.intersection(ids)
            assert tokenizer.decode(ids) == around
        assert tokenizer.encode_full(text) == [token_id]


def test_tokens_that_are_part_of_a_character(real_tokenizer: Tokenizer) -> None:
    ids = real_tokenizer.encode_plain("\U0001fae8")
    assert len(ids) > 1
    assert real_tokenizer.token_text(ids[0]) == "\ufffd"


def test_ids_outside_the_vocabulary_have_no_bytes(small_tokenizer: Tokenizer) -> None:
    assert small_tokenizer.token_bytes(-1) == b""
    assert small_tokenizer.token_bytes(small_tokenizer.vocab_size) == b""


def test_long_text_gives_the_same_ids_as_its_short_way(real_tokenizer: Tokenizer) -> None:
    text = "word, \u65e5\u672c 12\n" * LONG_TEXT
    per_line = real_tokenizer.encode_plain("word, \u65e5\u672c 12\n")
    assert real_tokenizer.encode_plain(text) == per_line * LONG_TEXT


def test_long_text_leaves_other_threads_running(real_tokenizer: Tokenizer) -> None:
    text = "some words, and 12 numbers\n" * 20_000
    done = threading.Event()
    ticks = 0

    def encode() -> None:
        real_tokenizer.encode_plain(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    assert ticks > 20


def test_lone_surrogates_are_refused(small_tokenizer: Tokenizer) -> None:
    for encode in (small_tokenizer.encode_plain, small_tokenizer.encode_full):
        with pytest.raises(ValueError, match="surrogate"):
            encode("a\ud800b")


def test_alphabet_covers_every_byte_once() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["\u0120"] == 0x20
    assert alphabet["\u010a"] == 0x0A


def test_missing_specials_are_named() -> None:
    added = json.loads(small_tokenizer_json())["added_tokens"]
    kept = [token for token in added if token["content"] not in (THINK, EOS)]
    with pytest.raises(FormatError, match="missing: .*end.*think"):
        Tokenizer(edited(added_tokens=kept))


def test_holes_are_reserved() -> None:
    parsed = json.loads(small_tokenizer_json())
    token = {**parsed["added_tokens"][0], "id": 362, "content": "<late>"}
    tokenizer = Tokenizer(edited(added_tokens=[*parsed["added_tokens"], token]))
    assert tokenizer.vocab_size == 363
    assert {360, 361} < set(tokenizer.reserved_ids)
    assert tokenizer.token_bytes(360) == b""


def _added(**fields: object) -> list[dict]:
    parsed = json.loads(small_tokenizer_json())
    first = {**parsed["added_tokens"][0], **fields}
    return [*parsed["added_tokens"], first]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\xff", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "object"),
        ("{}", "added_tokens"),
        (edited(model={"type": "WordPiece"}), "type BPE"),
        (edited(model={"vocab": []}), "model.vocab"),
        (edited(model={"byte_fallback": True}), "byte_fallback"),
        (edited(model={"ignore_merges": True}), "ignore_merges"),
        (edited(model={"unk_token": "<unk>"}), "unk_token"),
        (edited(pre_tokenizer=None), "pre_tokenizer"),
        (edited(decoder={"type": "Metaspace"}), "decoder"),
        (edited(model={"vocab": {"\u65e5": 3}}), "byte-level alphabet"),
        (edited(model={"vocab": {"a": 30, "b": 30}}), "two tokens"),
        (edited(model={"vocab": {"a": "30"}}), "id"),
        (edited(model={"vocab": {THINK: 300}}), "among added_tokens"),
        (edited(model={"vocab": {"a": 0}}), "plain and a special"),
        (edited(model={"merges": [["<", "/think>"]]}), "builds the special token '</think>'"),
        (edited(model={"merges": ["< think>"]}), "builds the special token '<think>'"),
        (edited(model={"merges": [["zz", "yy"]]}), "cannot be loaded"),
        (edited(added_tokens=_added(id=500)), "twice"),
        (edited(added_tokens=_added(content="new")), "twice"),
        (edited(added_tokens=_added(content="new", id=-1)), "id of 0 or more"),
        (edited(added_tokens=_added(content="new", id=True)), "id of 0 or more"),
        (edited(added_tokens=_added(content="new", id=10**9)), "ids up to"),
        (edited(added_tokens=[3]), "added token 3"),
    ],
)
def test_what_is_no_byte_level_bpe_is_refused(content: bytes | str, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        Tokenizer(content)


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_dsml_and_others_need_not_exist() -> None:
    parsed = json.loads(small_tokenizer_json())
    kept = [t for t in parsed["added_tokens"] if t["content"] not in (DSML, *EXTRA)]
    vocab = {k: v for k, v in parsed["model"]["vocab"].items() if k not in (DSML, *EXTRA)}
    tokenizer = Tokenizer(edited(added_tokens=kept, model={"vocab": vocab}))
    assert tokenizer.special_id(DSML) is None
    assert tokenizer.encode_full(BOS + END_THINK) == [tokenizer.bos_id, tokenizer.end_think_id]
