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

BUSY = (429, 502, 503, 504)
BUSY_TRIES = 8
LOST_TRIES = 4
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
SHOWN_CHARS = 300


class HttpFailure(Exception):
    """A status other than 200; `message` is the server's own, shortened."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


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
            timeout_s: longest silence of a reply.

        Raises:
            ConfigError: the address is none.
        """
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--base-url is {url!r}, expected an address such as http://127.0.0.1:8000/v1"
            )
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, url: str) -> Any:
        """The JSON behind an address, asked for once.

        Raises:
            HttpFailure: another status than 200.
            OSError: there is no answer, or one that is no HTTP.
            ValueError: the answer is no JSON.
        """
        return self._once(url, None)

    def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """Post JSON; waits and asks again where the server is busy or the connection breaks.

        Raises:
            HttpFailure: it is not served: 404, 405 or 501.
            RequestError: the server refuses the request.
            CapacityError: it is busy, and stayed so, or too slow.
            ConfigError: it refuses the key.
            EngineDied: it has gone, or `cancel` was called.
        """
        data = orjson.dumps(body)
        lost = busy = 0
        while True:
            if self._stopped.is_set():
                raise EngineDied("the evaluation was ended")
            try:
                return self._once(url, data)
            except _Busy as error:
                busy += 1
                if busy == BUSY_TRIES:
                    raise CapacityError(
                        f"the server was busy {BUSY_TRIES} times (HTTP {error.status}): "
                        f"{error.message}"
                    ) from error
                wait_s = error.wait_s if error.wait_s is not None else FIRST_WAIT_S * 2**busy
            except HttpFailure as error:
                raise self._meaning(error) from error
            except TimeoutError as error:
                raise CapacityError(
                    f"the server gave no reply in {self._timeout_s:g} s; give a longer --timeout"
                ) from error
            except (OSError, ValueError) as error:
                lost += 1
                if lost == LOST_TRIES:
                    raise EngineDied(
                        f"the server at {self.url} does not answer any more: {_reason(error)}"
                    ) from error
                wait_s = FIRST_WAIT_S * 2**lost
            self._stopped.wait(min(wait_s, LONGEST_WAIT_S))

    def cancel(self) -> None:
        """Ask nothing more; what waits ends."""
        self._stopped.set()

    def _once(self, url: str, data: bytes | None) -> Any:
        request = urllib.request.Request(url, data=data, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                return orjson.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                message = _message(error.read())
            if error.code in BUSY:
                wait_s = retry_after_s(error.headers.get("retry-after"))
                raise _Busy(error.code, message, wait_s) from error
            raise HttpFailure(error.code, message) from error
        except http.client.HTTPException as error:
            raise ConnectionError(f"no whole HTTP answer: {error!r}") from error

    def _meaning(self, error: HttpFailure) -> Exception:
        if error.status in (401, 403):
            return key_refused(self.url, error)
        if error.status in (404, 405, 501):
            return error
        if error.status >= 500:
            return RequestError(f"the server failed (HTTP {error.status}): {error.message}")
        return RequestError(f"the server refuses (HTTP {error.status}): {error.message}")


class _Busy(HttpFailure):
    def __init__(self, status: int, message: str, wait_s: float | None) -> None:
        super().__init__(status, message)
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


def _message(data: bytes) -> str:
    """The error text of a body in OpenAI's or a similar form, else its beginning."""
    try:
        found = orjson.loads(data)
    except ValueError:
        return data[:SHOWN_CHARS].decode("utf-8", "replace").strip() or "no message"
    for name in ("error", "message", "detail"):
        while isinstance(found, dict) and name in found:
            found = found[name]
    return str(found)[:SHOWN_CHARS]


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__
