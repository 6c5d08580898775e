"""The response as JSON: what its request asked for, and what has become of it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from inflight.http.api_error import APIError
from inflight.http.call import Call
from inflight.http.dialects.openai.responses.fields import ResponseBody
from inflight.http.dialects.openai.responses.output_item import COMPLETED, IN_PROGRESS, INCOMPLETE

FAILED = "failed"
MAX_OUTPUT_TOKENS = "max_output_tokens"


class ResponseObject:
    """Of one request."""

    def __init__(self, body: ResponseBody, call: Call) -> None:
        sampling = call.prepared.prompts[0].request.sampling_config
        self.id = call.answer_id
        self._head = {"id": self.id, "object": "response", "created_at": call.created}
        self._asked = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": call.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": _without_nulls(body.reasoning),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **_without_nulls(body.text)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def in_progress(self) -> dict[str, Any]:
        return self._fields(IN_PROGRESS, [], None)

    def ended(self, output: list[dict[str, Any]], usage: dict[str, Any], cut_by: str | None) -> dict[str, Any]:
        """`cut_by`: what ended it before the model had; None if the model did."""
        if cut_by is None:
            return {**self._fields(COMPLETED, output, usage), "completed_at": int(time.time())}
        return {**self._fields(INCOMPLETE, output, usage), "incomplete_details": {"reason": cut_by}}

    def failed(self, output: list[dict[str, Any]], error: APIError) -> dict[str, Any]:
        code = "invalid_prompt" if error.status < 500 else "server_error"
        return {**self._fields(FAILED, output, None), "error": {"code": code, "message": error.message}}

    def _fields(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        progress = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": usage}
        return {**self._head, **progress, **self._asked}


def _without_nulls(given: msgspec.Struct | None) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(given) if given is not None else {}
    return {
        name: {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }
