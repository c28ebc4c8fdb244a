"""HTTP requests that another thread can cut, by urllib: proxies and redirects stay its matter.

Read next: `http_client.py`.
"""

import contextlib
import http.client
import socket
import threading
import urllib.request
from functools import partial
from typing import Any


class Wire:
    """One request's connections; `cut` ends what is being read or written on them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.is_cut = False

    def add(self, connection: socket.socket) -> None:
        """Remember a connection; one that comes after the cut is cut too."""
        with self._lock:
            self._sockets.append(connection)
            if self.is_cut:
                _shut(connection)

    def cut(self) -> None:
        """End all connections; may be called from any thread, and again."""
        with self._lock:
            self.is_cut = True
            for connection in self._sockets:
                _shut(connection)

    def opener(self) -> urllib.request.OpenerDirector:
        """What opens addresses by connections of this wire."""
        return urllib.request.build_opener(_Plain(self), _Secure(self))


class _PlainConnection(http.client.HTTPConnection):
    def __init__(self, wire: Wire, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wire = wire

    def connect(self) -> None:
        super().connect()
        self._wire.add(self.sock)


class _SecureConnection(_PlainConnection, http.client.HTTPSConnection):
    pass


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(partial(_PlainConnection, self._wire), req)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(partial(_SecureConnection, self._wire), req)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        # the plain socket's way: that of TLS takes its state from the thread that reads
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
