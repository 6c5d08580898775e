"""The error that a request is answered with: an HTTP status and a sentence, which each dialect writes in its form."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import msgspec

from inflight.asking.refusal import Kind, Refusal, Words
from inflight.errors import EngineUnavailable, InflightError, QueueFull, RequestTimedOut
from inflight.result import Response
from inflight.text.safe_text import safe_text

RETRY_SECONDS = 1
"""What Retry-After says while the engine is full or is being relaunched."""

INTERNAL = "the server could not answer this request; its log says why"

OF_CODES = {"INVALID_ARGUMENT": 400, "ALREADY_EXISTS": 409, "UNAVAILABLE": 503, "CANCELLED": 499}
"""The engine's error codes -> HTTP status; others are 500."""
OF_KINDS: dict[Kind, tuple[int, str | None]] = {
    Kind.UNSUPPORTED: (400, "unsupported_parameter"),
    Kind.TOO_LONG: (400, "context_length_exceeded"),
    Kind.TOO_LARGE: (413, None),
}
"""Status and code of a refusal; of others 400 and none."""

VALUE = "[...]"
"""Stands in msgspec's paths for any key of an object."""

_PATH = re.compile(r"^(.*) - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


class APIError(Exception):
    """One request is answered with an error; the message is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """The request is wrong."""
    return APIError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> APIError:
    """A field that is known, and not honoured."""
    return invalid(f"{param} is not supported: {why}", param, "unsupported_parameter")


def overloaded(status: int, message: str) -> APIError:
    return APIError(status, message, headers={"Retry-After": str(RETRY_SECONDS)})


def of_refusal(refusal: Refusal, words: Words) -> APIError:
    """In the words of a dialect."""
    status, code = OF_KINDS.get(refusal.kind, (400, None))
    param = words.get(refusal.field, refusal.field) or None
    return APIError(status, refusal.said(words), param=param, code=code)


@contextlib.contextmanager
def in_words(words: Words) -> Iterator[None]:
    """What is refused within is refused as APIError."""
    try:
        yield
    except Refusal as refusal:
        raise of_refusal(refusal, words) from None


def of_validation(error: Exception, where: str = "") -> APIError:
    """Of a body that is no such request. `error`: msgspec's, which repeats no value but names of fields. `where`: the
    part of the body that it is about, "" = all of it."""
    if isinstance(error, RecursionError):
        return invalid("the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return invalid("the body is not valid JSON: " + safe_text(str(error)))
    text, param = str(error), ""
    if found := _PATH.match(text):
        text, param = found[1], found[2].removesuffix(VALUE)
    param = ".".join(filter(None, [where, param]))
    if found := _UNKNOWN.match(text):
        name = safe_text(".".join(filter(None, [param, found[1]])))
        return invalid(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    if found := _MISSING.match(text):
        name = safe_text(".".join(filter(None, [param, found[1]])))
        return invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    name = safe_text(param)
    return invalid(f"{name or 'the body'}: {safe_text(text)}", name or None, "invalid_type")


def of_engine(error: InflightError) -> APIError:
    """Of an error that this process found."""
    if isinstance(error, QueueFull | EngineUnavailable):
        return overloaded(503, str(error))
    return APIError(OF_CODES.get(error.code, 500), str(error))


def of_response(response: Response, param: str | None = None) -> APIError:
    """Of an error that the ranks found. `param`: the field that it is about, if the request is wrong."""
    if response.outcome == RequestTimedOut.outcome:
        return APIError(504, response.error_msg, headers={"x-should-retry": "false"})
    status = OF_CODES.get(response.error_code, 500)
    if status == 503:
        return overloaded(status, response.error_msg)
    return APIError(status, response.error_msg, param=param if status == 400 else None)
