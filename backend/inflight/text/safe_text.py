"""Makes user text safe for a log line or an error message: short, one line, no control characters."""

from __future__ import annotations

MAX_ECHOED_BYTES = 256


def safe_text(text: str, max_bytes: int = MAX_ECHOED_BYTES) -> str:
    """`text` with everything unprintable escaped, cut to at most `max_bytes` bytes of UTF-8."""
    head = text[:max_bytes]
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in head)
    whole = len(text) <= max_bytes and len(escaped.encode("utf-8", "replace")) <= max_bytes
    if whole:
        return escaped
    mark = "..."
    return escaped.encode("utf-8", "replace")[: max_bytes - len(mark)].decode("utf-8", "ignore") + mark
