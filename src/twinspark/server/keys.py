"""API keys: where they are read from, and whom a presented one belongs to.

Only digests are kept. A file of keys is looked at again once a second at most, so a key can be
taken away without a restart; a file that has become unusable lets nobody in.
Read next: `access.py`.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        label: what logs and metrics call its holder.
        digest: SHA-256 of the key.
        requests: most replies at a time; None is the server's setting.
        tokens_per_hour: most tokens an hour; None is the server's setting.
    """

    label: str
    digest: bytes
    requests: int | None = None
    tokens_per_hour: int | None = None


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
        self._keys = self._fixed if path is None else (*self._fixed, *read_key_file(path))

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
        self._seen = _signature(self._path)
        try:
            self._keys = (*self._fixed, *read_key_file(self._path))
        except ConfigError as error:
            self.problem = str(error)
            logger.error("nobody is let in until the keys are mended: %s", error)
            return
        if self.problem is not None:
            logger.warning("the keys are usable again")
        self.problem = None

    def _look(self) -> None:
        if self._path is None or self._clock() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._clock()
        if _signature(self._path) != self._seen:
            self.reload()


def read_key_file(path: Path) -> list[Key]:
    """Keys of a file: one a line, `[label:] key [requests=N] [tokens_per_hour=N]`.

    Empty lines and lines that begin with `#` are skipped. `sha256=HEX` may stand for a key.

    Raises:
        ConfigError: it cannot be read, others may read it, or a line is no key; the message never
            repeats what stands in it.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(f"the key file {path} is open to other users; chmod 600 it")
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the key file {path} is longer than {MAX_FILE_BYTES} bytes")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the key file {path} is not UTF-8 text") from error
    return list(_read_lines(lines, f"the key file {path}, line {{}}"))


def read_key_list(text: str, where: str) -> list[Key]:
    """Keys of one line, separated by commas; each as in a key file.

    Raises:
        ConfigError: a part is no key; the message names its place only.
    """
    return list(_read_lines(text.split(","), f"{where}, key {{}}"))


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
    return found


def _read_lines(lines: Iterable[str], where: str) -> Iterable[Key]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield _read_key(text, where.format(number))


def _read_key(text: str, where: str) -> Key:
    head, *words = text.split()
    label = None
    if head.endswith(":") and words:
        label, head, words = head[:-1], words[0], words[1:]
    if label is not None and not _LABEL.fullmatch(label):
        raise ConfigError(f"{where}: a label is 1 to 64 of A-Z a-z 0-9 . _ -")
    limits: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        is_count = value.isascii() and value.isdecimal() and 0 < int(value) < 2**53
        if name not in _LIMITS or not is_count:
            raise ConfigError(
                f"{where}: after the key only {' and '.join(f'{n}=N' for n in _LIMITS)} may stand; "
                "a label ends with a colon and a space"
            )
        limits[name] = int(value)
    digest = _digest(head, where)
    return Key(label=label or f"key-{digest.hex()[:8]}", digest=digest, **limits)


def _digest(key: str, where: str) -> bytes:
    if key.startswith(DIGEST_PREFIX):
        written = key.removeprefix(DIGEST_PREFIX)
        if not _DIGEST.fullmatch(written):
            raise ConfigError(f"{where}: sha256= needs 64 hexadecimal digits")
        return bytes.fromhex(written)
    if len(key) < MIN_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where}: a key is at least {MIN_KEY_CHARS} printable ASCII characters")
    return hashlib.sha256(key.encode()).digest()


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
