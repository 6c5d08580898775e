"""The chunks of a stream as server-sent events: bytes around a text, prepared once for a stream.

    data: {…,"choices":[{"index":0,"delta":   {"content":" dog"}   ,"logprobs":null,"finish_reason":null}]}

A chunk per token costs the text's own JSON and one concatenation.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.http.api_error import APIError
from inflight.http.dialects.openai.errors import in_openais_form

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Frames:
    """Of one stream of either kind. A `part` is JSON: a delta of a chat, a text of a completion."""

    def __init__(self, head: dict[str, Any], part: str, num_choices: int) -> None:
        """`head`: what all chunks have in common, as id and model. `part`: "delta" or "text"."""
        # The object's closing bracket goes: choices follow.
        self._open = b"data: " + _encode(head)[:-1] + b',"choices":['
        name = b',"' + part.encode() + b'":'
        self._heads = [self._open + b'{"index":%d' % index + name for index in range(num_choices)]
        self._plain_end = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def plain(self, index: int, part: bytes) -> bytes:
        """A chunk of new text."""
        return b"".join((self._heads[index], part, self._plain_end))

    def around(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the part."""
        return self._heads[index], self._plain_end

    def detailed(self, index: int, part: bytes, log_probs: dict[str, Any] | None, more: dict[str, Any]) -> bytes:
        """The same with log probabilities, and with further fields of the choice."""
        rest = {"logprobs": log_probs, "finish_reason": None, **more}
        return b"".join((self._heads[index], part, b",", _encode(rest)[1:], b"]}\n\n"))

    def finish(self, index: int, part: bytes, reason: str, stop_reason: str | int | None) -> bytes:
        """The last chunk of a choice."""
        rest = {"logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}
        return b"".join((self._heads[index], part, b",", _encode(rest)[1:], b"]}\n\n"))

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk behind all choices."""
        return self._open + b'],"usage":' + _encode(usage) + b"}\n\n"


def error_frame(error: APIError) -> bytes:
    return b"data: " + _encode(in_openais_form(error)[1]) + b"\n\n"
