"""Characters split across tokens: requirements R27 and R28."""

import pytest

from twinspark.text.detokenize import IncrementalDecoder
from twinspark.text.tokenizer import EOS, Tokenizer

SAMPLES = (
    "\U0001f469\U0001f3fd\u200d\U0001f680 \U0001faf1\U0001f3ff\u200d\U0001faf2",  # modifiers
    "\U0002a6d6\U00020b9f \u9f98\u9750 \U0003106c",  # rare CJK
    "e\u0301 a\u0323\u0302 Z\u0351\u036b\u0343 \u0e01\u0e33\u0e49",  # combining marks
    "\U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5 \U0001f3f4\U000e0067\U000e0062\U000e007f",  # flags
    "\U00013000\U0001d11e \u1e9e\u0130 \ufffd \ufeff \x00",  # a replacement mark that was written
)


@pytest.mark.parametrize("name", ["real_tokenizer", "small_tokenizer"])
@pytest.mark.parametrize("text", SAMPLES)
def test_one_id_at_a_time(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode_plain(text)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.feed((token_id,)) for token_id in ids] + [decoder.finish()]
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")
    assert [piece.encode() for piece in pieces]  # no half of a surrogate pair either


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    single = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [single[data[n : n + 1]] for n in range(len(data))]


@pytest.mark.parametrize(
    "data",
    [
        b"\xf0\x9f\x98", b"a\xf0\x9fb", b"\x80\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80",
        b"\xe2\x82\xe2\x82\xac", b"\xc0\xaf", b"\xf0\x80\x80\x80", b"\xff\xfe", b"\xe2\x28\xa1",
    ],
)  # fmt: skip
def test_invalid_bytes_as_all_at_once(data: bytes, small_tokenizer: Tokenizer) -> None:
    ids = byte_ids(small_tokenizer, data)
    decoder = IncrementalDecoder(small_tokenizer)
    pieces = [decoder.feed((token_id,)) for token_id in ids] + [decoder.finish()]
    assert "".join(pieces) == data.decode("utf-8", "replace") == small_tokenizer.decode(ids)


def test_a_special_token_ends_an_incomplete_character(small_tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(small_tokenizer, b"\xe2\x82"), small_tokenizer.eos_id]
    assert IncrementalDecoder(small_tokenizer).feed(ids) == "\ufffd" + EOS


def test_finish_starts_anew(small_tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(small_tokenizer)
    assert decoder.feed(byte_ids(small_tokenizer, b"\xe2\x82")) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.feed(byte_ids(small_tokenizer, b"\xac")) == "\ufffd"
    assert decoder.finish() == ""
