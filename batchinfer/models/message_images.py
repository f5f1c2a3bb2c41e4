"""Images in chat messages: no model here reads them, and some cannot be read at all."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

_PARTS = ("image", "image_url", "input_image")
_PLACES = ("image_url", "image", "url", "path", "base64", "bytes", "data", "file_id")
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*")


def is_image(kind: Any) -> bool:
    """Whether a content part of this type holds an image."""
    return kind in _PARTS


def image_problem(part: Mapping[str, Any]) -> str | None:
    """Why the image of a content part cannot be read, as far as that shows without fetching it; None: it may be."""
    image = next((part[place] for place in _PLACES if part.get(place) is not None), None)
    if isinstance(image, Mapping):  # {"url": ...} of a chat request, {"bytes", "path"} of a Hugging Face dataset
        image = next((image[place] for place in _PLACES if image.get(place) is not None), None)
    if image is None or image in ("", b""):
        return "it names none"
    if isinstance(image, str) and image.startswith("data:"):
        return _data_url_problem(image)
    if isinstance(image, bytes):
        return _bytes_problem(image)
    return None if isinstance(image, str) else f"it is of type {type(image).__name__}"


def _data_url_problem(url: str) -> str | None:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        return "its data URL does not hold base64"
    try:
        return _bytes_problem(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError) as error:
        return f"its base64 cannot be decoded: {error}"


def _bytes_problem(data: bytes) -> str | None:
    return None if data.startswith(_SIGNATURES) else "its bytes are no PNG, JPEG, GIF, WebP, BMP or TIFF"
