"""The body of POST /v1/responses. null counts as not given.

A field is honoured, refused with the reason, or unknown, which is an error as well. Knows no tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.body import NOT_HERE
from inflight.http.dialects.openai.fields import IN_MEMORY, TextBody, check_limits

LOG_PROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_schema", "json_object"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class AllowedFunctions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model is told of all tools, and calls none but these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class ResponseBody(TextBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    background: bool | None = None
    background_options: Any = None
    conversation: Any = None
    prompt: Any = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    moderation: Any = None
    context_management: Any = None
    access_programs: Any = None
    image: Any = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_log_probs(self) -> bool:
        return LOG_PROBS in (self.include or ())


class InputTokensBody(ResponseBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses/input_tokens"""

    input: str | list[dict[str, Any]] = msgspec.field(default_factory=list)


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "background": ((False,), "a response is made while its client waits"),
    "background_options": ((), "a response is made while its client waits"),
    "conversation": ((), "continue a conversation by previous_response_id"),
    "prompt": ((), "no prompt is stored here: send its text as instructions and input"),
    "truncation": (("disabled",), "nothing is left out of a conversation: shorten its input"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "prompt_cache_retention": (IN_MEMORY, "tritonserver's model `llm` takes retention tensors"),
    "prompt_cache_options": ((), "equal prefixes are always shared; cache_salt keeps them apart"),
    "moderation": ((), NOT_HERE),
    "context_management": (([],), "nothing is left out of a conversation: shorten its input"),
    "access_programs": ((), NOT_HERE),
    "image": ((), "this engine reads text"),
    "text.verbosity": (("medium",), NOT_HERE),
    "reasoning.summary": (("auto",), "reasoning items hold what the model has thought, and nothing sums it up"),
    "reasoning.generate_summary": (("auto",), "it was replaced by reasoning.summary"),
    "reasoning.context": (("auto",), "the chat template chooses which earlier reasoning the model sees"),
    "reasoning.mode": (("standard",), NOT_HERE),
    "stream_options.include_obfuscation": ((False,), NOT_HERE),
}
"""Field -> the values that ask for nothing, and why others are refused."""

ACCEPTED_UNUSED = ("user", "safety_identifier", "prompt_cache_key", "max_tool_calls")
"""They change no answer: they name the client's own user, help caches to find equal prefixes, which are always shared
here, or bound the calls of tools that only OpenAI's servers have."""


def check_body(body: ResponseBody) -> None:
    """Raise APIError for the first field that asks for what is not done."""
    for path, (harmless, why) in REFUSED.items():
        value: Any = body
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None and value not in harmless:
            raise unsupported(path, why)
    for name in body.include or ():
        if name not in (LOG_PROBS, ENCRYPTED_REASONING):
            raise unsupported("include", f"it may hold {LOG_PROBS} and {ENCRYPTED_REASONING} here")
    if body.top_logprobs and not body.wants_log_probs:
        raise invalid(f"top_logprobs needs include to hold {LOG_PROBS}", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise invalid(f"max_output_tokens must be at least 1, got {body.max_output_tokens}", "max_output_tokens")
    check_limits(body, body.metadata)
