"""The join: ranks find each other, compare what must be equal, and get their links (case R89).

Rank 0 listens; each other rank opens a fate link and a plan link to the same port. Whatever
differs is named with both values and ends all ranks. Read next: `team.py`.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic, sleep

from twinspark.distributed.notes import Note, NoteReader, readable, receive_note, send_note
from twinspark.errors import ConfigError, FormatError, RankFailed

Traits = Mapping[str, str]
"""Name -> value of everything that ranks must have in common."""

GREETING = "twinspark ranks 1"
ACCEPT_S = 0.25
HELLO_S = 2.0
ANSWER_S = 5.0
SEND_S = 0.5
MAX_GUESTS = 64
READ_BYTES = 1 << 16
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
class _Guest:
    """A connection that has not said yet who it is."""

    link: socket.socket
    source: str
    until_s: float
    reader: NoteReader = field(default_factory=NoteReader)


@dataclass
class _Door:
    """Where rank 0 receives the others: who has come so far, and who is about to say its name.

    Nobody is waited for alone: a slow guest holds up neither the others nor the limit.
    """

    listener: socket.socket
    size: int
    traits: Traits
    store_port: int
    fate: dict[int, socket.socket] = field(default_factory=dict)
    plan: dict[int, socket.socket] = field(default_factory=dict)
    tokens: dict[int, str] = field(default_factory=dict)
    guests: list[_Guest] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.size) if rank not in self.plan]

    def wait(self, timeout_s: float) -> int | None:
        """Receive whoever comes within this time; a rank that had joined and is gone, or None.

        Raises:
            RankFailed: a rank differs.
        """
        now = monotonic()
        wait_s = min([timeout_s, *(guest.until_s - now for guest in self.guests)])
        opens = [self.listener] if len(self.guests) < MAX_GUESTS else []
        joined = [*self.fate.items(), *self.plan.items()]
        links = [*opens, *(link for _, link in joined), *(guest.link for guest in self.guests)]
        ready = readable(links, max(0.0, wait_s))
        for rank, link in joined:
            if link in ready:  # nobody speaks before rank 0 begins, so this is the link's end
                return rank
        if self.listener in ready:
            self._open()
        for guest in list(self.guests):
            if guest.link in ready:
                self._hear(guest)
            if guest in self.guests and monotonic() >= guest.until_s:
                self._send_away(guest, "it did not say in time who it is")
        return None

    def _open(self) -> None:
        try:
            link, source = self.listener.accept()
        except OSError:  # it has gone already
            return
        link.settimeout(0.0)
        self.guests.append(_Guest(link, str(source[0]), monotonic() + HELLO_S))

    def _send_away(self, guest: _Guest, why: str) -> None:
        logger.warning("%s is no rank of ours: %s", guest.source, why)
        self.guests.remove(guest)
        guest.link.close()

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.link.recv(READ_BYTES)
            notes = guest.reader.feed(data)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, FormatError) as error:
            self._send_away(guest, str(error))
            return
        if not data:
            self._send_away(guest, "it closed the connection")
        elif notes:
            hello = notes[0]
            # of a bool, which is an int to Python, nothing good would come
            if hello.get("greeting") != GREETING or type(hello.get("rank")) is not int:
                self._send_away(guest, "it greets otherwise")
                return
            self.guests.remove(guest)
            guest.link.settimeout(SEND_S)
            if hello["type"] == "fate":
                self._take_fate(guest, hello)
            else:
                self._take_plan(guest, hello)

    def _take_fate(self, guest: _Guest, hello: Note) -> None:
        rank = hello["rank"]
        if rank in self.fate:
            logger.warning("a second rank %d came from %s and was sent away", rank, guest.source)
            text = f"rank {rank} has joined already; give every rank a number of its own"
            _refuse(guest.link, text)
            return
        self.fate[rank] = guest.link
        if problem := _difference(hello, self.size, self.traits):
            raise RankFailed(problem)
        self.tokens[rank] = token_hex(16)
        self._welcome(guest.link, token=self.tokens[rank])

    def _take_plan(self, guest: _Guest, hello: Note) -> None:
        """Of a rank whose fate link we have; the token says that both are of one process."""
        rank = hello["rank"]
        token = self.tokens.get(rank)
        if hello["type"] != "plan" or token is None or hello.get("token") != token:
            logger.warning("%s is no rank of ours: its fate link is missing", guest.source)
            _refuse(guest.link, f"rank {rank} must open its fate link first and show its token")
        elif rank in self.plan:
            _refuse(guest.link, f"rank {rank} has a plan link already")
        else:
            self.plan[rank] = guest.link
            self._welcome(guest.link)

    def _welcome(self, link: socket.socket, **more: str) -> None:
        note = {"type": "welcome", "greeting": GREETING, "store_port": self.store_port, **more}
        with suppress(OSError):  # a link that does not take it is found closed
            send_note(link, note)

    def begin(self) -> None:
        """Tell all that everybody is here; nobody else is let in.

        Raises:
            RankFailed: a rank does not hear it any more.
        """
        for rank, link in self.fate.items():
            try:
                send_note(link, {"type": "begin"})
            except OSError as error:
                raise RankFailed(f"rank {rank} is gone since it joined: {error}") from error
        for guest in self.guests:
            guest.link.close()

    def end(self, message: str) -> None:
        """Tell everybody why nothing comes of it, those too who stand at the door."""
        until_s = monotonic() + LATE_S
        for link in (*self.fate.values(), *self.plan.values()):
            _refuse(link, message)
        with suppress(OSError):
            for _ in range(MAX_GUESTS):
                link, source = self.listener.accept()
                self.guests.append(_Guest(link, str(source[0]), until_s))
        for guest in self.guests:
            # closing over unread bytes would take the answer away
            with suppress(OSError, FormatError):
                receive_note(guest.link, limit_s=until_s - monotonic())
            guest.link.settimeout(SEND_S)
            _refuse(guest.link, message)


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
        RankFailed: a rank differs, went away, or did not come.
    """
    door, start_s, news_s = _Door(listener, size, traits, store[1]), monotonic(), monotonic()
    listener.settimeout(0.0)
    host, port = listener.getsockname()[:2]
    try:
        while door.missing:
            waited_s = monotonic() - start_s
            what = f"waiting for rank {', '.join(map(str, door.missing))} at {host}:{port}"
            on_wait(what, min(1.0, waited_s / limit_s))
            check()
            if waited_s > limit_s:
                raise RankFailed(
                    f"rank {door.missing[0]} did not join within {limit_s:g} s; start it with "
                    f"--rank {door.missing[0]} --rendezvous {host}:{port}, and see that this port "
                    "can be reached from there"
                )
            if monotonic() - news_s >= NEWS_S:
                news_s = monotonic()
                logger.warning("%s (%.0f of %.0f s)", what, waited_s, limit_s)
            gone = door.wait(ACCEPT_S)
            if gone is not None:
                sleep(LATE_S)  # until a process of ours that died can be asked how
                check()
                raise RankFailed(
                    f"rank {gone} is gone while other ranks were awaited: its connection closed; "
                    "see its log, and start all ranks again"
                )
        door.begin()
    except BaseException as error:
        door.end(str(error) or "rank 0 gave up")
        raise
    return Links(fate=door.fate, plan=door.plan, store=store)


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
        about_us = {**hello, "type": "fate", "traits": dict(traits)}
        welcome = _ask(links[0], about_us, address, ANSWER_S + limit_s)
        try:
            links.append(_connect(address, ANSWER_S))
            ours = {**hello, "type": "plan", "token": welcome.get("token")}
            _ask(links[1], ours, address, ANSWER_S)
        except RankFailed as error:
            raise _refusal(links[0]) or error from None
        logger.info("rank %d has joined; waiting for the other ranks", rank)
        _answer(links[0], address, ANSWER_S + limit_s, expected="begin")
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
            return socket.create_connection(address, timeout=ANSWER_S)
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


def _ask(link: socket.socket, hello: Note, address: tuple[str, int], limit_s: float) -> Note:
    with suppress(OSError):
        send_note(link, hello)
    return _answer(link, address, limit_s, expected="welcome")


def _answer(
    link: socket.socket, address: tuple[str, int], limit_s: float, *, expected: str
) -> Note:
    where = f"{address[0]}:{address[1]}"
    try:
        note = receive_note(link, limit_s=limit_s)
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
    with suppress(OSError, FormatError):
        note = receive_note(link, limit_s=LATE_S)
        if note is not None and note["type"] == "refused":
            return RankFailed(str(note.get("message")))
    return None


def _refuse(link: socket.socket, message: str) -> None:
    with suppress(OSError):
        send_note(link, {"type": "refused", "message": message})
    link.close()
