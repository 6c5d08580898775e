"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

from typing import Any

from inflight.http.api_error import APIError

OVERLOADED = 529
"""Anthropic's status where others have 503."""
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
    504: "timeout_error",
}


def in_anthropics_form(error: APIError) -> tuple[int, dict[str, Any]]:
    """Status and body."""
    status = OVERLOADED if error.status == 503 else error.status
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": error.message}}
