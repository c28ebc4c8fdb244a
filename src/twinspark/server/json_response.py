"""JSON replies written with orjson."""

from typing import Any

import orjson
from starlette.responses import Response


class JsonResponse(Response):
    """A reply whose content is JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return orjson.dumps(content)
