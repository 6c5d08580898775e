"""How long clients of Ollama want a model to stay loaded: `keep_alive`, in seconds or as a duration of Go's."""

from __future__ import annotations

import math
import re
from typing import TypeAlias

from inflight.http.api_error import invalid
from inflight.text.safe_text import safe_text

KeepAlive: TypeAlias = float | str | None
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
PART = re.compile(r"(\d+\.?\d*|\.\d+)(ms|us|µs|ns|h|m|s)", re.ASCII)
DURATION = re.compile(rf"[+-]?(?:0|(?:{PART.pattern})+)", re.ASCII)
MAX_CHARS = 64
FOR_EVER = 1e9
"""Seconds, above which there is no difference."""


def read_keep_alive(given: KeepAlive) -> float | None:
    """Seconds; infinity = for ever, which is what anything below 0 means; None = the client does not say. Raises
    APIError."""
    if given is None:
        return None
    seconds = _seconds(given) if isinstance(given, str) else given
    return math.inf if seconds < 0 or seconds > FOR_EVER else seconds


def _seconds(text: str) -> float:
    if len(text) > MAX_CHARS or DURATION.fullmatch(text) is None:
        sentence = "keep_alive must be a number of seconds or a duration such as 10m or 1h30m"
        raise invalid(f"{sentence}, got {safe_text(text[:MAX_CHARS])}", "keep_alive")
    seconds = sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
    return -seconds if text.startswith("-") else seconds
