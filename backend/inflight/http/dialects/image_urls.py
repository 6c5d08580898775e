"""Pictures as clients send them: their files in base64, by themselves or in a data URL."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from inflight.asking.images import image_part
from inflight.http.api_error import invalid, unsupported

SCHEME, BASE64 = "data:", ";base64"
NO_FETCHING = "this server fetches nothing: send the image itself, as a data URL with base64"


def url_part(data: str, media_type: str = "") -> dict[str, Any]:
    """A file in base64 as a part of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": f"{SCHEME}{media_type}{BASE64},{data}"}}


def read_url(url: str, where: str) -> dict[str, Any]:
    """As `Chat` has it. `where`: the field that holds it. Raises APIError."""
    if not url[: len(SCHEME)].lower() == SCHEME:
        raise unsupported(where, NO_FETCHING)
    head, comma, data = url[len(SCHEME) :].partition(",")
    if not comma or not head.lower().endswith(BASE64):
        raise invalid(f"{where} must be a data URL with base64", where)
    return image_part(read_base64(data, where))


def read_base64(data: str, where: str) -> bytes:
    """Raises APIError."""
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"{where} is not valid base64", where) from None
