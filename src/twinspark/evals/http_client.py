"""JSON over HTTP to one server: keys, retries, and what its refusals mean.

The standard library's client: evaluations need five plain requests that block their thread, and
must run after any of the README's set-ups; the openai package comes only with an extra, takes a
second to import and hides fields of other servers. Read next: `servers.py`.
"""

import http.client
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import orjson

from twinspark.errors import CapacityError, ConfigError, EngineDied, RequestError
from twinspark.evals.printable import printable
from twinspark.evals.wire import Wire

BUSY = (429, 502, 503, 504)
BUSY_TRIES = 8
LOST_TRIES = 4
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
BUSY_IN_ALL_S = 120.0
SHOWN_CHARS = 300
ENDED = "the evaluation was ended"
LONGEST_TIMEOUT_S = 604800.0
ENGINE_GONE = ("engine_dead", "engine_ended")
REFUSED = "refused"
"""Code of a RequestError: the server does not serve such a request (4xx, or 501)."""


class HttpFailure(Exception):
    """A status other than 200; `message` is the server's own, shortened, and `code` its word."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class NoJson(ValueError):
    """A reply that is no JSON."""


class _Patience:
    """Tells a server that is busy for everyone, too long, from one that serves others meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking = 0
        self._waiting = 0
        self._busy_since: float | None = None

    def begin(self) -> None:
        """A request begins."""
        with self._lock:
            self._asking += 1

    def busy(self, *, is_first: bool) -> bool:
        """A request was told that the server is busy; whether that is so for all, too long."""
        with self._lock:
            self._waiting += is_first
            now = time.monotonic()
            if self._busy_since is None:
                self._busy_since = now
            is_long = now - self._busy_since >= BUSY_IN_ALL_S
            return is_long and self._waiting == self._asking

    def end(self, *, was_busy: bool, is_served: bool) -> None:
        """A request ends; one that was served shows that waiting helps."""
        with self._lock:
            self._asking -= 1
            self._waiting -= was_busy
            if is_served:
                self._busy_since = None


class HttpClient:
    """Asks one server; safe for several threads.

    Attributes:
        url: its base address, without a slash at the end.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """Remember the server.

        Args:
            url: http or https.
            api_key: sent as a bearer token; None sends none.
            timeout_s: what a whole reply may take, up to LONGEST_TIMEOUT_S.

        Raises:
            ConfigError: the address is none, or another argument cannot be used.
        """
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_address = is_address and parts.port != 0 and self.url.isprintable()
            is_address = is_address and " " not in self.url
        except ValueError:
            is_address = False
        if not is_address:
            raise ConfigError(
                f"--base-url is {url!r}, expected an address such as http://127.0.0.1:8000/v1"
            )
        if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise ConfigError(
                f"--timeout is {timeout_s:g}, expected seconds up to {LONGEST_TIMEOUT_S:.0f}"
            )
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "the key (--api-key or OPENAI_API_KEY) has a line break, or a character that no "
                "header can carry; give it without"
            )
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._patience = _Patience()
        self._wires: set[Wire] = set()
        self._wires_lock = threading.Lock()
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, url: str) -> Any:
        """The JSON behind an address, asked for once.

        Raises:
            HttpFailure: another status than 200.
            OSError: there is no answer, or one that is no HTTP.
            NoJson: the answer is no JSON.
        """
        return self._once(url, None)

    def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """Post JSON; waits and asks again where the server is busy or the connection breaks.

        Raises:
            HttpFailure: it is not served: 404, 405 or 501.
            RequestError: the server refuses the request (code `REFUSED`), fails, or its reply is no
                JSON.
            CapacityError: it is busy, and stayed so, or too slow.
            ConfigError: it refuses the key.
            EngineDied: it has gone, is busy for all too long, or `cancel` was called.
        """
        data = orjson.dumps(body)
        lost = busy = 0
        is_served = False
        self._patience.begin()
        try:
            while True:
                if self._stopped.is_set():
                    raise EngineDied(ENDED)
                try:
                    reply = self._once(url, data)
                    is_served = True
                    return reply
                except _Busy as error:
                    busy += 1
                    wait_s = self._busy_wait_s(error, busy)
                except HttpFailure as error:
                    is_served = True
                    raise self._meaning(error) from error
                except NoJson as error:
                    raise RequestError(str(error)) from error
                except TimeoutError as error:
                    raise CapacityError(
                        f"the server gave no whole reply in {self._timeout_s:g} s; give a longer "
                        "--timeout"
                    ) from error
                except (OSError, ValueError) as error:
                    lost += 1
                    if lost == LOST_TRIES:
                        raise EngineDied(
                            f"the server at {self.url} does not answer any more: {_reason(error)}"
                        ) from error
                    wait_s = FIRST_WAIT_S * 2**lost
                self._stopped.wait(min(wait_s, LONGEST_WAIT_S))
        finally:
            self._patience.end(was_busy=busy > 0, is_served=is_served)

    def cancel(self) -> None:
        """Ask nothing more; what waits or is being read ends."""
        self._stopped.set()
        with self._wires_lock:
            for wire in self._wires:
                wire.cut()

    def _busy_wait_s(self, error: "_Busy", times: int) -> float:
        """How long to wait after a busy answer, the `times`-th to a request.

        Raises:
            EngineDied: waiting does not help: the engine has gone, or it is long so for all.
            CapacityError: it was busy too often.
        """
        is_long = self._patience.busy(is_first=times == 1)
        if error.code in ENGINE_GONE:
            raise EngineDied(f"the server at {self.url} has lost its engine: {error.message}")
        if is_long:
            raise EngineDied(
                f"the server at {self.url} was busy for {BUSY_IN_ALL_S:.0f} s and served nothing "
                f"(HTTP {error.status}): {error.message}"
            )
        if times == BUSY_TRIES:
            raise CapacityError(
                f"the server was busy {BUSY_TRIES} times (HTTP {error.status}): {error.message}"
            )
        return FIRST_WAIT_S * 2**times if error.wait_s is None else error.wait_s

    def _once(self, url: str, data: bytes | None) -> Any:
        """Ask once; a timer cuts what takes too long, however it trickles."""
        wire = Wire()
        timer = threading.Timer(self._timeout_s, wire.cut)
        timer.daemon = True
        with self._wires_lock:
            self._wires.add(wire)
        timer.start()
        try:
            return self._read(wire, url, data)
        except (OSError, ValueError) as error:
            if self._stopped.is_set():
                raise EngineDied(ENDED) from error
            is_late = wire.is_cut or isinstance(getattr(error, "reason", None), TimeoutError)
            if is_late:
                raise TimeoutError(f"no whole reply in {self._timeout_s:g} s") from error
            raise
        finally:
            timer.cancel()
            with self._wires_lock:
                self._wires.discard(wire)

    def _read(self, wire: Wire, url: str, data: bytes | None) -> Any:
        request = urllib.request.Request(url, data=data, headers=self._headers)
        try:
            with wire.opener().open(request, timeout=self._timeout_s) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            with error:
                message, code = _message(error.read())
            if error.code in BUSY:
                wait_s = retry_after_s(error.headers.get("retry-after"))
                raise _Busy(error.code, message, code, wait_s) from error
            raise HttpFailure(error.code, message, code) from error
        except http.client.HTTPException as error:
            raise ConnectionError(f"no whole HTTP answer: {error!r}") from error
        if not text:
            raise ConnectionError("an empty answer")
        try:
            return orjson.loads(text)
        except ValueError as error:
            raise NoJson(f"the server's reply is no JSON: {_head(text)}") from error

    def _meaning(self, error: HttpFailure) -> Exception:
        if error.status in (401, 403):
            return key_refused(self.url, error)
        if error.code in ENGINE_GONE:
            return EngineDied(f"the server at {self.url} has lost its engine: {error.message}")
        if error.status in (404, 405, 501):
            return error
        if error.status >= 500:
            return RequestError(f"the server failed (HTTP {error.status}): {error.message}")
        return RequestError(
            f"the server refuses (HTTP {error.status}): {error.message}", code=REFUSED
        )


class _Busy(HttpFailure):
    def __init__(self, status: int, message: str, code: str, wait_s: float | None) -> None:
        super().__init__(status, message, code)
        self.wait_s = wait_s


def key_refused(url: str, error: HttpFailure) -> ConfigError:
    """The error for a 401 or 403."""
    return ConfigError(
        f"the server at {url} refuses the key (HTTP {error.status}): {error.message}; give "
        "--api-key or set OPENAI_API_KEY"
    )


def retry_after_s(header: str | None) -> float | None:
    """Seconds to wait by a Retry-After header, a number or a date; None if it says nothing."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _message(data: bytes) -> tuple[str, str]:
    """The error text of a body in OpenAI's or a similar form, else its beginning; and its code."""
    try:
        found = orjson.loads(data)
    except ValueError:
        return _head(data) or "no message", ""
    block = found.get("error") if isinstance(found, dict) else None
    code = block.get("code") if isinstance(block, dict) else None
    for name in ("error", "message", "detail"):
        while isinstance(found, dict) and name in found:
            found = found[name]
    return printable(str(found)[:SHOWN_CHARS]), str(code or "")


def _head(data: bytes) -> str:
    return printable(data[:SHOWN_CHARS].decode("utf-8", "replace").strip())


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__
