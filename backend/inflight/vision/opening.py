"""Opens the file of a picture, once its header says that it may be decoded. Knows nothing of networks."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SIDES_RATIO = 100
"""Of the longer side to the shorter one: processors scale the shorter one up to hundreds of pixels."""


class BadImage(Exception):
    """The message is a clause about the picture."""


def open_image(data: bytes, max_pixels: int) -> Image:
    """The decoded picture. Memory of it: a few bytes for each of at most `max_pixels`. Raises BadImage."""
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the bound here is exact, and no warning
    if not data:
        raise BadImage("is empty")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage("is no PNG, JPEG, WebP or GIF file") from None
    except Exception:
        raise BadImage("is truncated or damaged") from None
    width, height = image.size
    if width * height > max_pixels:
        raise BadImage(f"has {width} x {height} pixels, more than max_image_pixels {max_pixels}")
    if min(width, height) < 1 or max(width, height) > MAX_SIDES_RATIO * min(width, height):
        raise BadImage(f"has {width} x {height} pixels: a side may be at most {MAX_SIDES_RATIO} times the other")
    try:
        # Cameras write two pictures into a JPEG (MPO), of which the first one counts.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise BadImage("is animated: give one frame of it")
        image.load()
    except BadImage:
        raise
    except MemoryError:
        raise BadImage("takes too much memory to decode") from None
    except Exception:  # each decoder has its own
        raise BadImage("is truncated or damaged") from None
    return image
