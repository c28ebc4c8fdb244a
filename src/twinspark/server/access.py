"""Who may come in: host and origin of a request, its key, and what the key has left.

Stands before every route. Open without a key, for reading only and by their exact paths: the page,
its files, the API description, `/health` (a status word only), and metrics where the settings say
so. Read next: `keys.py`, `limits.py`, `upload.py`.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from twinspark.config.server import ServerConfig
from twinspark.server.errors import ApiError, answer, unavailable
from twinspark.server.guesses import Guesses
from twinspark.server.keys import Key, KeyRing
from twinspark.server.limits import Limits
from twinspark.server.metrics import Tally
from twinspark.server.page import FOLDER
from twinspark.server.upload import Patience, Upload

KEY_IN_SCOPE = "twinspark.key"
OPEN_PATHS = frozenset({"/", "/health", "/openapi.json", "/favicon.ico"})
GENERATING = ("/completions", "/messages", "/responses")
KEYS_RETRY_S = 5
CORS_AGE_S = 600
READING = ("GET", "HEAD")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]*))(?::[0-9]*)?")


class Access:
    """Lets a request through with its key noted in the scope, or answers it.

    Args:
        app: what stands behind.
        config: the server's settings.
        keys: who may come in.
        limits: what they may ask for.
        tally: counts who was turned away.
    """

    def __init__(
        self, app: ASGIApp, *, config: ServerConfig, keys: KeyRing, limits: Limits, tally: Tally
    ) -> None:
        self._app = app
        self._tally = tally
        self._keys = keys
        self._limits = limits
        self._guesses = Guesses()
        self._origins = frozenset(config.cors_origins)
        self._metrics_open = config.metrics_open
        names = [entry.name for entry in FOLDER.iterdir()] if config.page else []
        self._open_paths = OPEN_PATHS | {f"/static/{name}" for name in names}
        self._patience = Patience(unsent_s=config.unsent_s or None, body_s=config.body_s or None)
        self._hosts: frozenset[str] | None = None
        if config.is_loopback:
            self._hosts = frozenset({config.host, *(h.lower() for h in config.allowed_hosts)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            key = self._check(scope)
            counted = key if _generates(scope) else None
            if counted is not None:
                self._limits.check(counted)
        except ApiError as error:
            self._tally.refused[error.code or ""] += 1
            await answer(error, scope)(scope, receive, send)
            return
        scope[KEY_IN_SCOPE] = key
        body = Upload(receive, self._limits, counted, self._tally, self._patience)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()

    def _check(self, scope: Scope) -> Key | None:
        headers = Headers(scope=scope)
        _check_one_host(scope, headers)
        self._check_host(headers.get("host"))
        self._check_origin(scope, headers)
        if not self._keys.is_required:
            return None
        presented = presented_keys(headers)
        key = self._judged(scope, presented)
        if key is not None or self._is_open(scope):
            return key
        if self._keys.problem is not None:
            raise unavailable(
                "the server's keys cannot be read at the moment; its log says why",
                code="keys_unusable",
                retry_s=KEYS_RETRY_S,
            )
        what = "the key is not known here" if presented else "this server asks for a key"
        raise ApiError(
            401,
            f"{what}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _judged(self, scope: Scope, presented: Sequence[str]) -> Key | None:
        """Whose keys they are; nobody's where keys cannot be read.

        Raises:
            ApiError: 429 for an address that has shown too many wrong ones.
        """
        if not presented:
            return None
        found = [self._keys.find(one) for one in presented]
        key = next((one for one in found if one is not None), None)
        address = scope["client"][0] if scope.get("client") else ""
        refusal = self._guesses.refusal(address, key)
        if refusal is not None and not self._is_open(scope):
            raise refusal
        if refusal is not None or self._keys.problem is not None:
            return None
        self._guesses.note(address, key, num_keys=len(presented))
        return key

    def _check_host(self, host: str | None) -> None:
        """Refuse names that only a rebound DNS entry can have brought to a loopback address.

        Names of one word belong to no stranger's zone.
        """
        if self._hosts is None or host is None:
            return
        name = _host_name(host)
        if name is not None:
            is_word = not set(".:") & set(name.removesuffix(".localhost"))
            if is_word or name in self._hosts or _is_loopback(name):
                return
        raise ApiError(
            403,
            "this server listens for its own machine only and does not go by the name in the Host "
            "header; add it with --allowed-host to accept it",
            code="host_not_allowed",
        )

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuse what a page of another site sends without asking first (no preflight)."""
        origin = headers.get("origin")
        if origin is None or scope["method"] not in ("POST", "DELETE") or "*" in self._origins:
            return
        if origin in self._origins or _same_site(origin, headers.get("host", "")):
            return
        raise ApiError(
            403,
            f"pages of the origin {origin[:100]!r} may not use this server; allow it with "
            "--cors-origin",
            code="origin_not_allowed",
        )

    def _is_open(self, scope: Scope) -> bool:
        """Whether no key is needed. A prefix never is: routes match by the end of a path."""
        path: str = scope["path"]
        if scope["method"] not in READING:
            return False
        return path in self._open_paths or (self._metrics_open and path.endswith("/metrics"))


def front(config: ServerConfig, *, keys: KeyRing, limits: Limits, tally: Tally) -> list[Middleware]:
    """What stands before the routes; pages of other sites get their headers on refusals too."""
    access = Middleware(Access, config=config, keys=keys, limits=limits, tally=tally)
    if not config.cors_origins:
        return [access]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["retry-after", "x-twinspark-ignored-fields"],
        max_age=CORS_AGE_S,
    )
    return [cors, access]


def presented_keys(headers: Headers) -> list[str]:
    """The keys of a request, one in each of two headers at most: some clients fill both."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    bearer = value.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key", "").strip()) if key]


def key_of(scope: Scope) -> Key | None:
    """The key of a request that was let in with one."""
    key: Key | None = scope.get(KEY_IN_SCOPE)
    return key


def _generates(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path.rstrip("/").endswith(GENERATING)


def _check_one_host(scope: Scope, headers: Headers) -> None:
    """As HTTP/1.1 wants it (RFC 9112, 3.2), so that all on the way mean the same server."""
    num_hosts = len(headers.getlist("host"))
    if num_hosts > 1 or (not num_hosts and scope.get("http_version") == "1.1"):
        raise ApiError(
            400,
            f"the request has {num_hosts or 'no'} Host headers, expected one",
            code="host_header",
        )


def _host_name(host: str) -> str | None:
    """Name or address of a Host header in small letters; None for what is not written as one."""
    found = _HOST.fullmatch(host.lower())
    return None if found is None else found[1] or found[2]


def _is_loopback(name: str) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _same_site(origin: str, host: str) -> bool:
    try:
        site = urlsplit(origin).netloc
    except ValueError:  # such as "http://["
        return False
    return bool(host) and site.lower() == host.lower()
