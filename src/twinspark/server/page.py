"""The page at `/`: chat and live figures, as files of this package that need no build step.

They are read once and revalidated by digest. They hold no secret, so they need no key; what they
show does. Read next: `static/index.html`, `health.py` (gives the figures).
"""

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = resources.files("twinspark.server") / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",  # kept by the browser, asked about each time
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


@dataclass(frozen=True)
class _File:
    data: bytes
    media_type: str
    digest: str


class Page:
    """The files of the page, in memory."""

    def __init__(self) -> None:
        self._files = {
            entry.name: _File(
                data := entry.read_bytes(),
                MEDIA_TYPES["." + entry.name.rpartition(".")[2]],
                f'"{hashlib.sha256(data).hexdigest()[:32]}"',
            )
            for entry in FOLDER.iterdir()
        }

    def routes(self) -> list[Route]:
        """Where the files are served."""
        return [
            Route("/", self._index, methods=["GET"]),
            Route("/static/{name}", self._file, methods=["GET"]),
        ]

    async def _index(self, request: Request) -> Response:
        return self._answer(request, INDEX)

    async def _file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = HEADERS | {"etag": file.digest}
        if file.digest in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.data, media_type=file.media_type, headers=headers)
