"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from inflight.http.api_error import APIError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def in_openais_form(error: APIError) -> tuple[int, dict[str, Any]]:
    """Status and body."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return error.status, {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
