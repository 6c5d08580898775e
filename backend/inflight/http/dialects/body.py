"""Bodies of requests: their JSON as a structure, and what every dialect's have."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from inflight.http.api_error import invalid, of_validation
from inflight.sampling_config import MAX_SEED

T = TypeVar("T")
NOT_HERE = "this engine has no such thing"
MIN_SEED = -(2**63)
MAX_PROMPTS = 1024
"""Of one body."""


def decode_body(data: bytes, kind: type[T]) -> T:
    """Raises APIError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise of_validation(error) from None


def read_seed(seed: int | None) -> int | None:
    """Raises APIError."""
    if seed is None:
        return None
    if not MIN_SEED <= seed <= MAX_SEED:
        raise invalid("seed must be a 64-bit integer", "seed")
    return seed % 2**64
