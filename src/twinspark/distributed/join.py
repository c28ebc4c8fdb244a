"""The join: ranks find each other, compare what must be equal, and get their links (case R89).

Rank 0 listens; each other rank opens a fate link and a plan link to the same port. Whatever
differs is named with both values and ends all ranks. Read next: `team.py`.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep

from twinspark.distributed.notes import Note, receive_note, send_note
from twinspark.errors import ConfigError, FormatError, RankFailed

Traits = Mapping[str, str]
"""Name -> value of everything that ranks must have in common."""

GREETING = "twinspark ranks 1"
ACCEPT_S = 0.25
HELLO_S = 5.0
LATE_S = 0.5
RETRY_S = 0.25
NEWS_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Connected sockets of a rank that has joined.

    Attributes:
        fate: peer -> socket.
        plan: peer -> socket.
        store: host and port of the collectives' key-value store.
    """

    fate: dict[int, socket.socket]
    plan: dict[int, socket.socket]
    store: tuple[str, int]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; IPv6 hosts stand in brackets.

    Raises:
        ConfigError: it is written otherwise.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"the rendezvous is {text!r}, expected HOST:PORT, such as 10.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(host: str, port: int) -> socket.socket:
    """A socket on which rank 0 waits for the others; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot use {host!r} as the rendezvous: {error}; give an address of this machine"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot wait for ranks on {host} port {port}: {error.strerror}; is another rank 0 "
            "running there?"
        ) from error
    return listener


@dataclass
class _Waiting:
    """Ranks that have come so far."""

    size: int
    fate: dict[int, socket.socket] = field(default_factory=dict)
    plan: dict[int, socket.socket] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.size) if rank not in self.plan]

    def end(self, listener: socket.socket, message: str) -> None:
        """Tell everybody why nothing comes of it, those too who stand at the door."""
        for link in (*self.fate.values(), *self.plan.values()):
            _refuse(link, message)
        listener.settimeout(0.0)
        with suppress(OSError):
            while True:
                link, _ = listener.accept()
                link.settimeout(LATE_S)
                with suppress(OSError, FormatError):
                    receive_note(link)  # closing over unread bytes would take the answer away
                _refuse(link, message)


def gather_ranks(
    listener: socket.socket,
    size: int,
    traits: Traits,
    *,
    store: tuple[str, int],
    limit_s: float,
    on_wait: Callable[[str, float], None],
    check: Callable[[], None],
) -> Links:
    """Rank 0: wait for all others.

    Args:
        listener: as of `listen`.
        size: number of ranks.
        traits: what they must have in common.
        store: told to everybody.
        limit_s: longest wait for all.
        on_wait: told several times a second what is awaited, and the part of the limit that is
            gone; what it raises ends the join.
        check: raises RankFailed when a rank will not come.

    Raises:
        RankFailed: a rank differs, or did not come.
    """
    came, start_s, news_s = _Waiting(size), monotonic(), monotonic()
    listener.settimeout(ACCEPT_S)
    host, port = listener.getsockname()[:2]
    try:
        while came.missing:
            waited_s = monotonic() - start_s
            what = f"waiting for rank {', '.join(map(str, came.missing))} at {host}:{port}"
            on_wait(what, min(1.0, waited_s / limit_s))
            check()
            if waited_s > limit_s:
                raise RankFailed(
                    f"rank {came.missing[0]} did not join within {limit_s:g} s; start it with "
                    f"--rank {came.missing[0]} --rendezvous {host}:{port}, and see that this port "
                    "can be reached from there"
                )
            if monotonic() - news_s >= NEWS_S:
                news_s = monotonic()
                logger.warning("%s (%.0f of %.0f s)", what, waited_s, limit_s)
            _accept(listener, came, traits, store)
    except BaseException as error:
        came.end(listener, str(error) or "rank 0 gave up")
        raise
    for link in came.fate.values():
        send_note(link, {"type": "begin"})
    return Links(fate=came.fate, plan=came.plan, store=store)


def _accept(
    listener: socket.socket, came: _Waiting, traits: Traits, store: tuple[str, int]
) -> None:
    try:
        link, source = listener.accept()
    except TimeoutError:
        return
    link.settimeout(HELLO_S)
    try:
        hello = receive_note(link)
    except (OSError, FormatError) as error:
        hello = None
        logger.warning("%s is no rank of ours: %s", source[0], error)
    if hello is None or hello.get("greeting") != GREETING:
        link.close()
        return
    rank, kind = hello.get("rank"), hello.get("type")
    if not isinstance(rank, int) or kind not in ("fate", "plan"):
        link.close()
        return
    if rank in (came.fate if kind == "fate" else came.plan):
        logger.warning("a second rank %d came from %s and was sent away", rank, source[0])
        _refuse(link, f"rank {rank} has joined already; give every rank a number of its own")
        return
    if kind == "plan":
        came.plan[rank] = link
    else:
        came.fate[rank] = link
        if problem := _difference(hello, came.size, traits):
            raise RankFailed(problem)
    with suppress(OSError):
        send_note(link, {"type": "welcome", "greeting": GREETING, "store_port": store[1]})


def _difference(hello: Note, size: int, traits: Traits) -> str | None:
    """What makes a rank unfit, as a sentence."""
    rank, theirs = hello["rank"], hello.get("traits")
    if hello.get("size") != size:
        return (
            f"rank {rank} was started as one of {hello.get('size')} ranks, rank 0 as one of "
            f"{size}; give every rank the same --tp"
        )
    if not 0 < rank < size:
        return f"a rank {rank} came, expected 1 to {size - 1}; give every rank its own --rank"
    if not isinstance(theirs, dict):
        return f"rank {rank} did not say what it runs"
    for name in [*traits, *(name for name in theirs if name not in traits)]:
        mine, other = traits.get(name, "unknown"), theirs.get(name, "unknown")
        if mine != other:
            return (
                f"rank {rank} cannot join: its {name} is {other}, rank 0 has {mine}; "
                "ranks must be started with equal packs, versions and settings"
            )
    return None


def join_rank0(
    address: tuple[str, int], rank: int, size: int, traits: Traits, *, limit_s: float
) -> Links:
    """Any other rank: find rank 0 and join.

    Raises:
        RankFailed: rank 0 is not there, is something else, or refuses.
    """
    hello = {"greeting": GREETING, "rank": rank, "size": size}
    links = []
    try:
        links.append(_connect(address, limit_s))
        links[0].settimeout(HELLO_S + limit_s)
        welcome = _ask(links[0], {**hello, "type": "fate", "traits": dict(traits)}, address)
        try:
            links.append(_connect(address, HELLO_S))
            _ask(links[1], {**hello, "type": "plan"}, address)
        except RankFailed as error:
            raise _refusal(links[0]) or error from None
        logger.info("rank %d has joined; waiting for the other ranks", rank)
        _answer(links[0], address, expected="begin")
    except BaseException:
        for link in links:
            link.close()
        raise
    for link in links:
        link.settimeout(None)
    store = (address[0], int(welcome["store_port"]))
    return Links(fate={0: links[0]}, plan={0: links[1]}, store=store)


def _connect(address: tuple[str, int], limit_s: float) -> socket.socket:
    where, start_s, news_s = f"{address[0]}:{address[1]}", monotonic(), monotonic()
    while True:
        try:
            return socket.create_connection(address, timeout=HELLO_S)
        except socket.gaierror as error:
            raise ConfigError(f"the rendezvous {where} is no address: {error.strerror}") from error
        except OSError as error:
            waited_s, cause = monotonic() - start_s, error.strerror or str(error)
        if waited_s > limit_s:
            raise RankFailed(
                f"rank 0 did not answer at {where} within {limit_s:g} s ({cause}); start it with "
                f"--rank 0 --rendezvous {where}, and see that this port can be reached from here"
            )
        if monotonic() - news_s >= NEWS_S:
            news_s = monotonic()
            logger.warning(
                "waiting for rank 0 at %s: %s (%.0f of %.0f s)", where, cause, waited_s, limit_s
            )
        sleep(RETRY_S)


def _ask(link: socket.socket, hello: Note, address: tuple[str, int]) -> Note:
    with suppress(OSError):
        send_note(link, hello)
    return _answer(link, address, expected="welcome")


def _answer(link: socket.socket, address: tuple[str, int], *, expected: str) -> Note:
    where = f"{address[0]}:{address[1]}"
    try:
        note = receive_note(link)
    except FormatError as error:
        raise RankFailed(f"what answers at {where} is no rank 0 of twinspark: {error}") from error
    except OSError as error:
        raise RankFailed(f"rank 0 at {where} went silent during the join: {error}") from error
    if note is None:
        raise RankFailed(f"rank 0 at {where} closed the connection during the join; see its log")
    if note["type"] == "refused":
        raise RankFailed(str(note.get("message")))
    if note["type"] != expected:
        raise RankFailed(f"what answers at {where} is no rank 0 of twinspark")
    return note


def _refusal(link: socket.socket) -> RankFailed | None:
    """What rank 0 said on a link before it went, if it said anything."""
    link.settimeout(LATE_S)
    with suppress(OSError, FormatError):
        note = receive_note(link)
        if note is not None and note["type"] == "refused":
            return RankFailed(str(note.get("message")))
    return None


def _refuse(link: socket.socket, message: str) -> None:
    with suppress(OSError):
        send_note(link, {"type": "refused", "message": message})
    link.close()
