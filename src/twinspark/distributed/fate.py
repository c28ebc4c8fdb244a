"""The fate link: ranks live and end together (cases R97, R99).

A thread of its own sends a heartbeat to every peer and listens. A closed link, or silence, means
that a peer is gone: the first cause found is kept, told to all other peers, and handed to one
callback. A halt announced before is no failure. No collective and no lock of the engine is needed
for any of this. Read next: `team.py`.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from twinspark.distributed.notes import Note, NoteReader, pack_note, readable
from twinspark.distributed.plan_link import close_socket
from twinspark.errors import FormatError, RankFailed

BEAT_S = 0.5
LOADING_SILENCE_S = 60.0
"""While weights load a process may be deaf for long; a closed link counts at once all the same."""
OVERSLEPT_S = 1.0
READ_BYTES = 1 << 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What a rank last said about its memory.

    Attributes:
        usable_bytes: that it could still take, or None where it is not watched.
        age_s: since it said so.
    """

    usable_bytes: int | None
    age_s: float


@dataclass
class _Peer:
    link: socket.socket
    reader: NoteReader
    heard_s: float
    usable_bytes: int | None = None
    usable_s: float = 0.0


class Fate:
    """This rank's end of the fate links to its peers: all others on rank 0, rank 0 on the others.

    Attributes:
        failure: why all ranks end, once that is so.
        has_halted: an orderly end was announced, by us or by a peer.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, socket.socket],
        *,
        timeout_s: float,
        usable_bytes: Callable[[], int | None],
        on_failure: Callable[[RankFailed], None],
        on_note: Callable[[int, Note], None],
        how_ended: Callable[[int], str | None] = lambda _rank: None,
    ) -> None:
        """Take connected sockets; nothing runs before `start`.

        Args:
            rank: this one.
            links: peer -> socket.
            timeout_s: silence that counts as death once everybody serves.
            usable_bytes: this rank's memory, sent with every heartbeat.
            on_failure: called once, from the thread that found the failure.
            on_note: called from the fate thread with notes that are not about fate.
            how_ended: how a peer's process ended, where this process can tell.
        """
        self.failure: RankFailed | None = None
        self.has_halted = False
        self._rank = rank
        self._timeout_s = timeout_s
        self._silence_s = max(timeout_s, LOADING_SILENCE_S)
        self._beat_s = min(BEAT_S, timeout_s / 4)
        self._usable_bytes = usable_bytes
        self._on_failure, self._on_note, self._how_ended = on_failure, on_note, how_ended
        now = monotonic()
        self._peers = {rank: _Peer(link, NoteReader(), now) for rank, link in links.items()}
        # signal handlers may fail a rank in the middle of anything
        self._lock = threading.RLock()
        self._sending = threading.RLock()
        self._failed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fate", daemon=True)

    def start(self) -> None:
        """Begin to beat and to listen."""
        now = monotonic()
        for peer in self._peers.values():
            peer.heard_s = now
        self._thread.start()

    def be_strict(self) -> None:
        """Everybody has loaded: from now on the short limit for silence holds."""
        self._silence_s = self._timeout_s

    def send(self, note: Note) -> None:
        """Send a note to every peer; one that cannot take it is found dead elsewhere."""
        data = pack_note(note)
        with self._sending:
            for peer in self._peers.values():
                with suppress(OSError):  # a full buffer is as good as a closed link
                    peer.link.sendall(data, socket.MSG_DONTWAIT)

    def fail(self, message: str) -> RankFailed:
        """All ranks must end, for this cause; the failure that counts, which may be an earlier one.

        Once a halt was announced nothing is told to anybody any more.
        """
        with self._lock:
            if self.failure is not None:
                return self.failure
            failure = RankFailed(message)
            if self.has_halted:
                return failure
            self.failure = failure
        self.send({"type": "fail", "message": message})
        self._failed.set()
        self._on_failure(failure)
        return failure

    def halt(self) -> None:
        """Announce an orderly end: the peers' going is no failure from here on."""
        self.has_halted = True
        self.send({"type": "halt"})

    def wait_failure(self, timeout_s: float) -> RankFailed | None:
        """Wait until a cause is known, or the time is over."""
        self._failed.wait(timeout_s)
        return self.failure

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until every peer has closed its link."""
        self._thread.join(timeout_s)

    def memory(self) -> dict[int, RankMemory]:
        """What each peer last said about its memory."""
        now = monotonic()
        return {
            rank: RankMemory(usable_bytes=peer.usable_bytes, age_s=now - peer.usable_s)
            for rank, peer in self._peers.items()
        }

    def close(self) -> None:
        """Stop beating and close the links."""
        self._closing = True
        self.has_halted = True
        for peer in self._peers.values():
            close_socket(peer.link)
        started = self._thread.ident is not None
        if started and self.failure is None and self._thread is not threading.current_thread():
            self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        open_peers = dict(self._peers)
        next_beat_s = monotonic()
        while not self._closing and open_peers:
            now = monotonic()
            if now >= next_beat_s:
                self._beat()
                next_beat_s = now + self._beat_s
            silent_s = min(peer.heard_s for peer in open_peers.values()) + self._silence_s
            wait_s = max(0.0, min(next_beat_s, silent_s) - now)
            ready = readable([peer.link for peer in open_peers.values()], wait_s)
            if monotonic() - now > wait_s + OVERSLEPT_S:  # it was this process that was stopped
                for peer in open_peers.values():
                    peer.heard_s = monotonic()
            for rank, peer in list(open_peers.items()):
                if peer.link in ready and not self._read(rank, peer):
                    del open_peers[rank]
                elif monotonic() - peer.heard_s >= self._silence_s and not self.has_halted:
                    silence_s = monotonic() - peer.heard_s
                    self._lost(rank, f"it stopped answering {silence_s:.1f} s ago")
                    del open_peers[rank]

    def _beat(self) -> None:
        self.send({"type": "beat", "usable_bytes": self._usable_bytes()})

    def _read(self, rank: int, peer: _Peer) -> bool:
        """Take what came; whether the link is still open."""
        try:
            data = peer.link.recv(READ_BYTES)
        except OSError:
            data = b""
        peer.heard_s = monotonic()
        try:
            for note in peer.reader.feed(data):
                self._take(rank, peer, note)
        except (FormatError, KeyError, TypeError, ValueError) as error:
            self._lost(rank, f"it sent nonsense: {error}")
            return False
        if not data and not self.has_halted:
            how = self._how_ended(rank)
            self._lost(rank, how or "its connection closed without a word; it was killed or fell")
        return bool(data)

    def _take(self, rank: int, peer: _Peer, note: Note) -> None:
        match note["type"]:
            case "beat":
                usable = note.get("usable_bytes")
                peer.usable_bytes = usable if isinstance(usable, int) else None
                peer.usable_s = peer.heard_s
            case "fail":
                self.fail(str(note.get("message")))
            case "halt":
                self.has_halted = True
                self._on_note(rank, note)
            case _:
                self._on_note(rank, note)

    def _lost(self, rank: int, how: str) -> None:
        if self._closing:
            return
        message = f"rank {rank} is gone: {how}"
        if rank == 0:
            message = f"rank {self._rank} ended, because rank 0 is gone for it: {how}"
        self.fail(message)
