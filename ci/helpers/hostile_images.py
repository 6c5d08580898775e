"""Files that no server should trust: each is refused with one sentence."""

from __future__ import annotations

import struct
import zlib

from image_checkpoints import file_of, make_image

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def png_of_size(width: int, height: int) -> bytes:
    """Some hundred bytes whose header promises that many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(2**16)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def gif_of_size(width: int, height: int) -> bytes:
    small = bytearray(file_of(make_image(4, 4), "GIF"))
    small[6:10] = struct.pack("<HH", width, height)
    return bytes(small)


def animated(kind: str) -> bytes:
    frames = [make_image(20, 20, seed) for seed in range(3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


WHOLE_JPEG, WHOLE_PNG = file_of(make_image(64, 64), "JPEG"), file_of(make_image(64, 64))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "text": (b"hello" * 99, "is no PNG, JPEG, WebP or GIF file"),
    "svg": (SVG, "is no PNG, JPEG, WebP or GIF file"),
    "bitmap": (file_of(make_image(9, 9), "BMP"), "is no PNG, JPEG, WebP or GIF file"),
    "tiff": (file_of(make_image(9, 9), "TIFF"), "is no PNG, JPEG, WebP or GIF file"),
    "pdf": (b"%PDF-1.7\n" + bytes(99), "is no PNG, JPEG, WebP or GIF file"),
    "a header of PNG alone": (WHOLE_PNG[:8], "is"),
    "half a PNG": (WHOLE_PNG[: len(WHOLE_PNG) // 2], "is truncated or damaged"),
    "half a JPEG": (WHOLE_JPEG[: len(WHOLE_JPEG) // 2], "is truncated or damaged"),
    "a PNG with less than it promises": (png_of_size(3000, 3000), "is truncated or damaged"),
    "a bomb of PNG": (png_of_size(100_000, 100_000), "more than max_image_pixels"),
    "a bomb of GIF": (gif_of_size(65_535, 65_535), "more than max_image_pixels"),
    "a line": (png_of_size(100_000, 1), "a side may be at most"),
    "an animated GIF": (animated("GIF"), "is animated"),
    "an animated WebP": (animated("WEBP"), "is animated"),
    "an animated PNG": (animated("PNG"), "is animated"),
}
"""File, and what the sentence about it says."""
