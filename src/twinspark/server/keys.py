"""API keys: where they are read from, and whom a presented one belongs to.

Only digests are kept. A file of keys is looked at again once a second at most, so a key can be
taken away without a restart; a file that has become unusable, for whatever reason, lets nobody in.
No two keys have the same label or the same value, over all sources.
Read next: `access.py`.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from twinspark.errors import ConfigError

LOOK_EVERY_S = 1.0
MIN_KEY_CHARS = 8
MAX_FILE_BYTES = 1 << 20
DIGEST_PREFIX = "sha256="
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LIMITS = ("requests", "tokens_per_hour")
_COUNT = re.compile(r"[1-9][0-9]{0,14}")
_LIMIT_FIRST = re.compile(rf"(?i)(?:{'|'.join(_LIMITS)})=.*")
_DIGEST_MISWRITTEN = re.compile(r"(?i)(?:sha-?[0-9]+|md5)[=:].*")
_STUCK_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}:.+")
_BREAK = re.compile("[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        label: what logs and metrics call its holder.
        digest: SHA-256 of the key.
        requests: most replies at a time; None is the server's setting.
        tokens_per_hour: most tokens an hour; None is the server's setting.
        where: the place it was read from, for messages.
    """

    label: str
    digest: bytes
    requests: int | None = None
    tokens_per_hour: int | None = None
    where: str = field(default="", compare=False, repr=False)


def scope_of(key: Key | None) -> str:
    """What is kept for later belongs to this: the key itself, whatever its label; "" without."""
    return "" if key is None else key.digest.hex()


class KeyRing:
    """The keys of a server.

    Attributes:
        problem: why nobody is let in now, or None.
    """

    def __init__(
        self,
        keys: Sequence[Key] = (),
        *,
        path: Path | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Read the file, if one is named.

        Args:
            keys: those that stay.
            path: a file of more keys, which may change.
            clock: gives seconds.

        Raises:
            ConfigError: the file cannot be used.
        """
        self.problem: str | None = None
        self._fixed = tuple(keys)
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._seen = None if path is None else _signature(path)
        self._keys = self._read()
        if path is not None and not self._keys:
            logger.warning("the key file has no key, so nobody is let in")

    @property
    def is_required(self) -> bool:
        """Whether a key is asked for at all."""
        return self._path is not None or bool(self._fixed)

    def find(self, presented: str) -> Key | None:
        """The key that was presented, or None; takes as long for a wrong one."""
        self._look()
        if self.problem is not None:
            return None
        digest = hashlib.sha256(presented.encode("utf-8", "replace")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def reload(self) -> None:
        """Read the file again; what is wrong with it is logged and closes the server."""
        if self._path is None:
            return
        before, was_closed = self._keys, self.problem
        self._keys, self.problem = (), "the keys are being read"
        try:
            self._seen = _signature(self._path)
            self._keys = self._read()
        except Exception as error:  # whatever it is, old keys must not stay valid
            is_known = isinstance(error, ConfigError)
            self.problem = str(error) if is_known else f"reading failed: {type(error).__name__}"
            if self.problem != was_closed:
                logger.error("nobody is let in until the keys are mended: %s", self.problem)
            return
        self.problem = None
        if was_closed is not None:
            logger.warning("the keys are usable again")
        _log_change(before, self._keys)

    def _read(self) -> tuple[Key, ...]:
        filed = () if self._path is None else read_key_file(self._path)
        return tuple(_unlike((*self._fixed, *filed)))

    def _look(self) -> None:
        if self._path is None or self._clock() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._clock()
        if self.problem is not None or _signature(self._path) != self._seen:
            self.reload()


def _log_change(before: Sequence[Key], after: Sequence[Key]) -> None:
    old, new = ({key.digest for key in keys} for keys in (before, after))
    counts = len(after), len(new - old), len(old - new)
    if not after:
        logger.warning("the key file has no key any more, so nobody is let in")
    elif before != after:
        logger.warning("the keys were read again: %d keys, %d new, %d gone", *counts)


def read_key_file(path: Path) -> list[Key]:
    """Keys of a file: one a line, `[label:] key [requests=N] [tokens_per_hour=N]`.

    Empty lines and lines that begin with `#` are skipped. `sha256=HEX` may stand for a key.

    Raises:
        ConfigError: it cannot be read, its group or others may read it, or a line is no key; the
            message never repeats what stands in it.
    """
    data = _read_private(path)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the key file {path} is longer than {MAX_FILE_BYTES} bytes")
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the key file {path} is not UTF-8 text") from error
    where = f"the key file {path}, line ".replace("{", "{{").replace("}", "}}")
    return list(_unlike(_read_lines(lines, where + "{}")))


def _read_private(path: Path) -> bytes:
    try:
        # A pipe that took the file's place must not make the server wait for its writer.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(number, "rb") as file:
            mode = os.fstat(number).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"the key file {path} is no regular file")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"the key file {path} is open to its group or to other users; chmod 600 it"
                )
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the key file has a name that no file can have: {error}") from error


def read_key_list(text: str, where: str) -> list[Key]:
    """Keys of one line, separated by commas; each as in a key file.

    Raises:
        ConfigError: a part is no key; the message names its place only.
    """
    return list(_unlike(_read_lines(text.split(","), f"{where}, key {{}}")))


def read_digests(texts: Iterable[str], where: str) -> list[Key]:
    """Keys given as digests, for places that others can read, such as the command line.

    Raises:
        ConfigError: one is no `[label:] sha256=HEX`.
    """
    found: list[Key] = []
    for text in texts:
        if DIGEST_PREFIX not in text:
            raise ConfigError(
                f"{where} takes '[label:] sha256=HEX', since every user of this machine can read "
                "arguments; give keys themselves in a file or in TWINSPARK_API_KEYS"
            )
        found += _read_lines([text], where)
    return list(_unlike(found))


def _unlike(keys: Iterable[Key]) -> Iterable[Key]:
    """The keys, as long as each has a label and a value of its own."""
    seen: dict[str | bytes, Key] = {}
    for key in keys:
        for what, value in (("key", key.digest), ("label", key.label)):
            first = seen.setdefault(value, key)
            if first is not key:
                raise ConfigError(
                    f"{key.where}: the {what} is also that of {first.where}; each key needs a "
                    "value and a label of its own"
                )
        yield key


def _read_lines(lines: Iterable[str], where: str) -> Iterable[Key]:
    for number, line in enumerate(lines, 1):
        if _BREAK.search(line.removesuffix("\r")):
            raise ConfigError(f"{where.format(number)}: only a newline may end a line")
        text = line.strip()
        if text and not text.startswith("#"):
            yield _read_key(text, where.format(number))


def _read_key(text: str, where: str) -> Key:
    head, *words = re.split(r"[ \t]+", text)
    label = None
    if head.endswith(":") and not _DIGEST_MISWRITTEN.fullmatch(head):
        if not words:
            raise ConfigError(f"{where}: a key is missing after the label")
        label, head, words = head[:-1], words[0], words[1:]
    if label is not None and not _LABEL.fullmatch(label):
        raise ConfigError(f"{where}: a label is 1 to 64 of A-Z a-z 0-9 . _ -")
    _check_head(head, where, has_label=label is not None)
    limits = _read_limits(words, where)
    digest = _digest(head, where)
    name = label or f"key-{digest.hex()[:8]}"
    return Key(label=name, digest=digest, where=where, **limits)


def _check_head(head: str, where: str, *, has_label: bool) -> None:
    """Refuse in the place of a key what is surely meant as something else."""
    if _LIMIT_FIRST.fullmatch(head):
        raise ConfigError(f"{where}: a limit stands in the place of the key; the key comes first")
    if _DIGEST_MISWRITTEN.fullmatch(head) and not head.startswith(DIGEST_PREFIX):
        raise ConfigError(f"{where}: a digest is written {DIGEST_PREFIX} and 64 hexadecimal digits")
    if not has_label and _STUCK_LABEL.fullmatch(head):
        raise ConfigError(
            f"{where}: a label ends with a colon and a space; a key with a colon in it needs a "
            "label before it"
        )


def _read_limits(words: Sequence[str], where: str) -> dict[str, int]:
    limits: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _LIMITS or not _COUNT.fullmatch(value):
            raise ConfigError(
                f"{where}: after the key only {' and '.join(f'{n}=N' for n in _LIMITS)} may stand, "
                "N from 1 to 15 digits long; a label ends with a colon and a space"
            )
        if name in limits:
            raise ConfigError(f"{where}: {name}= stands there twice")
        limits[name] = int(value)
    return limits


def _digest(key: str, where: str) -> bytes:
    if key.startswith(DIGEST_PREFIX):
        written = key.removeprefix(DIGEST_PREFIX)
        if not _DIGEST.fullmatch(written):
            raise ConfigError(f"{where}: sha256= needs 64 hexadecimal digits")
        return bytes.fromhex(written)
    if len(key) < MIN_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where}: a key is at least {MIN_KEY_CHARS} printable ASCII characters")
    return hashlib.sha256(key.encode()).digest()


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode
