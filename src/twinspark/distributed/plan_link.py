"""The plan link: frames from rank 0 to the others over connections of their own.

One frame a forward pass, written to every rank before rank 0 starts it. Nothing travels the other
way. Read next: `frames.py`, `engine/wire.py`.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress

from twinspark.distributed.frames import HEADER_BYTES, Frame, parse_frame, parse_header
from twinspark.errors import RankFailed


class PlanSender:
    """Rank 0's end."""

    def __init__(self, links: Mapping[int, socket.socket]) -> None:
        """Take a connected socket a following rank."""
        self._links = dict(links)
        for link in self._links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: bytes) -> None:
        """Write a frame to every rank.

        Raises:
            RankFailed: a rank does not take it.
        """
        for rank, link in self._links.items():
            try:
                link.sendall(frame)
            except OSError as error:
                raise RankFailed(f"rank {rank} does not take the plan: {error}") from error

    def send_now(self, frame: bytes) -> None:
        """Write a last frame to every rank that can take it at once; the others' links end."""
        for link in self._links.values():
            with suppress(OSError):
                link.sendall(frame, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the links; whoever writes or reads at this moment is woken."""
        for link in self._links.values():
            close_socket(link)


class PlanReceiver:
    """A following rank's end."""

    def __init__(self, link: socket.socket) -> None:
        """Take a connected socket."""
        self._link = link

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            RankFailed: the link is gone.
            FormatError: what came is no frame.
        """
        header = self._read(HEADER_BYTES)
        _, size = parse_header(header)
        return parse_frame(header + self._read(size))

    def close(self) -> None:
        """End the link; whoever reads at this moment is woken."""
        close_socket(self._link)

    def _read(self, size: int) -> bytes:
        parts, left = [], size
        while left:
            try:
                part = self._link.recv(min(left, 1 << 20))
            except OSError as error:
                raise RankFailed(f"the plan link to rank 0 broke: {error}") from error
            if not part:
                raise RankFailed("rank 0 closed the plan link without a word")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def close_socket(link: socket.socket) -> None:
    """Close a connection and wake whoever is blocked in it."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
