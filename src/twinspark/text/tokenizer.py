"""The pack's tokenizer.json: text to ids, safely or fully, and the bytes of every id.

Owns the byte table and the special tokens, which are found by their text: ids differ from pack to
pack. Not the prompt format (`template.py`), not the way back to text (`detokenize.py`).
"""

import json
import re
import secrets
import stat
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeGuard

import tokenizers

from twinspark.errors import FormatError
from twinspark.text.known_texts import KnownTexts

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
PAD = "<\uff5c\u2581pad\u2581\uff5c>"
SYSTEM = "<\uff5cSystem\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
LATEST_REMINDER = "<\uff5clatest_reminder\uff5c>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "\uff5cDSML\uff5c"
IMAGE = "<\uff5cdeepseek_image\uff5c>"
FIM_BEGIN = "<\uff5cfim\u2581begin\uff5c>"
FIM_HOLE = "<\uff5cfim\u2581hole\uff5c>"
FIM_END = "<\uff5cfim\u2581end\uff5c>"
REQUIRED = (BOS, EOS, SYSTEM, USER, ASSISTANT, LATEST_REMINDER, THINK, END_THINK)

# Prompt format 2: what training left unused but a sampler can still draw.
RESERVED = re.compile(
    "<\uff5cplace\u2581holder\u2581no\u2581\\d+\uff5c>"
    "|<\\|place_holder_mm_span_\\d+\\|>"
    "|<\uff5c(?:rl_image_pad|rl_image_start|deepseek_image)\uff5c>"
)
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_FILE_BYTES = 256 << 20
LONG_TEXT = 4096  # characters; above it encoding lets other threads run


class Tokenizer:
    """A byte-level BPE with special tokens. Immutable; may be shared between threads.

    Attributes:
        vocab_size: largest id + 1.
        bos_id: first id of every prompt.
        eos_id: the only id that ends a reply by itself.
        system_id: marker of a system message; also the noise id of draft blocks.
        user_id: marker of a user turn.
        assistant_id: marker of an assistant turn.
        latest_reminder_id: marker of a reminder.
        think_id: opens reasoning.
        end_think_id: closes reasoning.
        pad_id: padding, or None if the vocabulary has none.
        specials: text to id of every added token.
        reserved_ids: ascending ids that samplers mask by default: placeholders, and ids without a
            token.
    """

    def __init__(self, tokenizer_json: bytes | str) -> None:
        """Read the content of a tokenizer.json.

        Raises:
            FormatError: it is not one, not a byte-level BPE, or lacks a required special token.
        """
        self._json, parsed = _parse(tokenizer_json)
        self.specials = _added_tokens(parsed)
        missing = [text for text in REQUIRED if text not in self.specials]
        if missing:
            raise FormatError(
                "tokenizer.json: expected the special tokens of DeepSeek-V4.1 among added_tokens; "
                f"missing: {', '.join(missing)}"
            )
        _check_byte_level(parsed, self.specials)
        self._bytes = _byte_table(parsed["model"]["vocab"], self.specials)
        self._plain = _build(json.dumps({**parsed, "added_tokens": []}, ensure_ascii=False))
        self._known = KnownTexts()
        self.vocab_size = len(self._bytes)
        self.bos_id = self.specials[BOS]
        self.eos_id = self.specials[EOS]
        self.system_id = self.specials[SYSTEM]
        self.user_id = self.specials[USER]
        self.assistant_id = self.specials[ASSISTANT]
        self.latest_reminder_id = self.specials[LATEST_REMINDER]
        self.think_id = self.specials[THINK]
        self.end_think_id = self.specials[END_THINK]
        self.pad_id = self.specials.get(PAD)
        unused = {token_id for token_id, data in enumerate(self._bytes) if data is None}
        reserved = {i for text, i in self.specials.items() if RESERVED.fullmatch(text)}
        self.reserved_ids = tuple(sorted(unused | reserved))

    @classmethod
    def from_file(cls, path: Path | str) -> "Tokenizer":
        """Read a tokenizer.json.

        Raises:
            FormatError: as the constructor, or the file cannot be read.
        """
        try:
            data = _read(Path(path))
        except OSError as error:
            raise FormatError(
                f"cannot read the tokenizer {path}: {error.strerror or error}; make it readable, "
                "or copy the release's"
            ) from error
        return cls(data)

    def special_id(self, text: str) -> int | None:
        """The id of an added token by its exact text, or None."""
        return self.specials.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that an id stands for, perhaps half a character.

        Added tokens give their text; ids without a token give no bytes.
        """
        if 0 <= token_id < len(self._bytes):
            return self._bytes[token_id] or b""
        return b""

    def token_text(self, token_id: int) -> str:
        """The same as text by itself, with U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def encode_plain(self, text: str) -> list[int]:
        """Base BPE only: no text can become a special id. For everything a client wrote.

        Raises:
            ValueError: the text has a lone surrogate.
        """
        return self._known.ids_of(text, partial(_encode, self._plain))

    def encode_full(self, text: str) -> list[int]:
        """BPE with added tokens recognised in the text; nothing is prepended.

        Raises:
            ValueError: the text has a lone surrogate.
        """
        return _encode(self._full, text)

    def decode(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """Text of ids all at once, specials included, U+FFFD for invalid bytes."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def closed_json(self) -> str:
        """The file with every added token special, and under a name that nobody can guess.

        For libraries that encode text by themselves: with it no text becomes a special token,
        whatever a client wrote.
        """
        nonce = secrets.token_hex(16)
        parsed = json.loads(self._json)
        names = {text: f"{nonce}:{token_id}" for text, token_id in self.specials.items()}
        for entry in parsed["added_tokens"]:
            entry.update(content=names[entry["content"]], special=True, normalized=False)
        vocab = parsed["model"]["vocab"]
        parsed["model"]["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
        return json.dumps(parsed, ensure_ascii=False)

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token of plain text: n bytes of text take at least n / this ids."""
        specials = set(self.specials.values())
        plain = (data for i, data in enumerate(self._bytes) if data and i not in specials)
        return max(map(len, plain), default=1)

    @cached_property
    def _full(self) -> tokenizers.Tokenizer:
        return _build(self._json)


def byte_alphabet() -> dict[str, int]:
    """Character to byte of the byte-level alphabet that GPT-2 introduced.

    Printable Latin-1 characters stand for their own code; the other 68 bytes follow from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return alphabet


def _encode(engine: tokenizers.Tokenizer, text: str) -> list[int]:
    """Short texts go the quick way; long ones through the call that releases the lock."""
    if SURROGATE.search(text):
        raise ValueError("the text has a lone surrogate and so is no Unicode text")
    ids: list[int]
    if len(text) <= LONG_TEXT:
        ids = engine.encode(text, add_special_tokens=False).ids
    else:
        ids = engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _read(path: Path) -> bytes:
    """As pack/files.py, which this package does not know: a regular file of a sane size."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        raise FormatError(
            f"{path}: expected a regular file of at most {MAX_FILE_BYTES} bytes; copy the release's"
        )
    with path.open("rb") as file:
        return file.read(status.st_size)


def _parse(data: bytes | str) -> tuple[str, dict[str, Any]]:
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"tokenizer.json is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise FormatError("tokenizer.json: expected a JSON object")
    return text, parsed


def _added_tokens(parsed: Mapping[str, Any]) -> dict[str, int]:
    added = parsed.get("added_tokens")
    if not isinstance(added, list):
        raise FormatError("tokenizer.json: expected a list named added_tokens")
    specials: dict[str, int] = {}
    taken: set[int] = set()
    for entry in added:
        text = entry.get("content") if isinstance(entry, dict) else None
        token_id = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text or not _is_id(token_id):
            raise FormatError(
                f"tokenizer.json: added token {entry!r} needs a content and an id of 0 or more"
            )
        if text in specials or token_id in taken:
            raise FormatError(f"tokenizer.json: added token {text!r} (id {token_id}) comes twice")
        specials[text] = token_id
        taken.add(token_id)
    return specials


def _check_byte_level(parsed: Mapping[str, Any], specials: Mapping[str, int]) -> None:
    """Refuse what would give other ids or other bytes than a plain byte-level BPE."""
    model = parsed.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise FormatError("tokenizer.json: expected a model of type BPE")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise FormatError(f"tokenizer.json: model.{key} is {model[key]!r}, expected null")
    for key in ("byte_fallback", "fuse_unk", "ignore_merges"):
        if model.get(key):
            raise FormatError(f"tokenizer.json: model.{key} is true, expected false")
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise FormatError("tokenizer.json: expected model.vocab and model.merges")
    for part in ("pre_tokenizer", "decoder"):
        if not _mentions_byte_level(parsed.get(part)):
            raise FormatError(f"tokenizer.json: expected a ByteLevel {part}")
    for merge in model["merges"]:
        merged = "".join(merge) if isinstance(merge, list) else str(merge).replace(" ", "", 1)
        if merged in specials:
            raise FormatError(
                f"tokenizer.json: a merge builds the special token {merged!r} out of plain text"
            )


def _mentions_byte_level(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    steps = [part, *(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return any(isinstance(step, dict) and step.get("type") == "ByteLevel" for step in steps)


def _byte_table(vocab: Mapping[str, Any], specials: Mapping[str, int]) -> list[bytes | None]:
    """Bytes by id; None where an id below the largest has no token."""
    alphabet = {ord(character): chr(byte) for character, byte in byte_alphabet().items()}
    by_id: dict[int, bytes] = {}
    for text, token_id in vocab.items():
        if not _is_id(token_id):
            raise FormatError(f"tokenizer.json: token {text!r} has the id {token_id!r}")
        if text in specials:
            if specials[text] != token_id:
                raise FormatError(
                    f"tokenizer.json: {text!r} is id {token_id} in the vocabulary "
                    f"and id {specials[text]} among added_tokens"
                )
            continue
        if token_id in by_id:
            raise FormatError(f"tokenizer.json: id {token_id} is given to two tokens")
        try:
            by_id[token_id] = text.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError as error:
            raise FormatError(
                f"tokenizer.json: token {text!r} is not written in the byte-level alphabet"
            ) from error
    for text, token_id in specials.items():
        if token_id in by_id:
            raise FormatError(f"tokenizer.json: id {token_id} is a plain and a special token")
        by_id[token_id] = text.encode()
    return _dense(by_id)


def _dense(by_id: Mapping[int, bytes]) -> list[bytes | None]:
    size = max(by_id) + 1
    if size > 2 * len(by_id) + 1024:
        raise FormatError(f"tokenizer.json: {len(by_id)} tokens, but ids up to {size - 1}")
    return [by_id.get(token_id) for token_id in range(size)]


def _build(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower for a file it cannot read
        raise FormatError(f"tokenizer.json cannot be loaded: {error}") from error


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
