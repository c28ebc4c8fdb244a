"""What a message says: one text, and the images in it by their place.

Prompt format 5.1 and 10. Parts are joined by two line feeds, images included. Loading and measuring
images is not done here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from twinspark.errors import RequestError
from twinspark.text.fields import Feature, not_supported, read_object, read_text, require, shown
from twinspark.text.segments import Segment, special
from twinspark.text.tokenizer import IMAGE

JOINT = "\n\n"
_OTHER_PARTS = ("image", "input_image", "input_audio", "file", "video_url")


@dataclass(frozen=True)
class ImagePart:
    """An image of a message.

    Attributes:
        at: characters of the message's text before it.
        url: where it is, or the image itself as a data URL.
        where: the place in the request, for messages.
    """

    at: int
    url: str
    where: str


@dataclass(frozen=True)
class Content:
    """A text with images in it."""

    text: str = ""
    images: tuple[ImagePart, ...] = ()

    def segments(self) -> list[Segment]:
        """Plain text with one placeholder an image."""
        segments: list[Segment] = []
        start = 0
        for image in self.images:
            segments += [Segment(self.text[start : image.at]), *special(IMAGE)]
            start = image.at
        return [*segments, Segment(self.text[start:])]


def read_content(value: Any, where: str, *, role: str, serves: Collection[Feature]) -> Content:
    """Flatten the content of a message; null is empty.

    Raises:
        RequestError: it is of a wrong type, or a part is unknown or not served.
    """
    if value is None:
        return Content()
    if not isinstance(value, list):
        return Content(read_text(value, where, "a string, null or a list of parts"))
    pieces: list[str] = []
    images: list[ImagePart] = []
    length = 0
    for n, part in enumerate(value):
        at = f"{where}[{n}]"
        piece = _read_part(part, at, role, serves)
        joint = JOINT * (n > 0)
        length += len(joint)
        if piece is None:
            images.append(ImagePart(length, _image_url(part, at), at))
        text = joint + (piece or "")
        pieces.append(text)
        length += len(piece or "")
    return Content("".join(pieces), tuple(images))


def _read_part(part: Any, where: str, role: str, serves: Collection[Feature]) -> str | None:
    """Its text, or None for an image."""
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with a type", param=where)
    kind = part.get("type")
    if kind == "text":
        return read_text(part.get("text"), f"{where}.text")
    if kind != "image_url" and kind not in _OTHER_PARTS:
        raise RequestError(
            f"{where}.type is {shown(kind)}, which is unknown; expected text", param=f"{where}.type"
        )
    if role == "assistant":
        raise RequestError(f"{where}: an assistant message takes text only", param=f"{where}.type")
    if kind != "image_url":
        raise not_supported(f"{where}.type", f"the part type {kind}")
    require("images", serves, f"{where}.type", "an image part")
    return None


def _image_url(part: Mapping[str, Any], where: str) -> str:
    image = read_object(part.get("image_url"), f"{where}.image_url")
    return read_text(image.get("url"), f"{where}.image_url.url")
