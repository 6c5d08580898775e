"""Fields of bodies that have bounds of their own here: texts, because each costs others something, and numbers on
other scales than the engine's."""

from __future__ import annotations

import re

import numpy as np

from inflight.http.api_error import invalid
from inflight.http.call import fresh_id
from inflight.http.dialects.openai.fields import Body
from inflight.sampling_config import MAX_BIAS

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_WORDS = 1024
MAX_SALT_BYTES = 256
MAX_PRIORITY = 2**20
"""Up to here each priority of a request has one of its own on the engine's scale."""
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def read_stops(body: Body) -> list[str]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop has {len(stops)} entries, more than {MAX_STOPS}", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(f"stop must hold texts of 1 to {MAX_STOP_CHARS} characters", "stop")
    return stops


def read_words(words: list[str] | None) -> list[str]:
    words = words or []
    if len(words) > MAX_WORDS or sum(map(len, words)) > MAX_WORDS * 16:
        raise invalid(f"bad_words may have {MAX_WORDS} entries and {MAX_WORDS * 16} characters", "bad_words")
    if not all(words):
        raise invalid("bad_words must hold no empty text", "bad_words")
    return words


def read_salt(salt: str | None) -> str:
    if salt is not None and not 0 < len(salt.encode("utf-8", "replace")) <= MAX_SALT_BYTES:
        raise invalid(f"cache_salt must be a text of 1 to {MAX_SALT_BYTES} bytes", "cache_salt")
    return salt or ""


def engine_priority(priority: int | None) -> float:
    """vLLM's priorities are integers, and lower ones go first; the engine's are from 0 to 1, and higher ones do."""
    if priority is None:
        return 0.5
    if abs(priority) > MAX_PRIORITY:
        raise invalid(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {priority}", "priority")
    return 0.5 - 0.5 * priority / (1 + abs(priority))


def allowed_alone(allowed: list[int] | None, vocab_size: int) -> bytes:
    """Biases that leave no other token than the allowed ones; b"" if all are."""
    if allowed is None:
        return b""
    if not allowed or not all(0 <= token < vocab_size for token in allowed):
        sentence = f"allowed_token_ids must hold token ids from 0 to {vocab_size - 1}, at least one"
        raise invalid(sentence, "allowed_token_ids")
    bias = np.full(vocab_size, -MAX_BIAS, dtype="<f4")
    bias[allowed] = 0.0
    return bias.tobytes()


def read_request_id(given: str | None) -> str:
    if given is None:
        return fresh_id()
    if not _REQUEST_ID.fullmatch(given):
        raise invalid("request_id must be 1 to 128 printable ASCII characters without spaces", "request_id")
    return given
