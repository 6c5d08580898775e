"""The body of POST /v1/messages. null counts as not given.

A field is honoured, listed in REFUSED with the reason, without effect where Anthropic's own server has none that a
client could see, or unknown, which is an error as well. Knows no tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.body import NOT_HERE
from inflight.text.safe_text import safe_text

MIN_BUDGET = 1024
MAX_TEMPERATURE = 1.0
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
CUSTOM_TOOL = "custom"
OF_THINKING = "clear_thinking"
"""Edits of a context that begin so leave out what the model thought before, which chat templates do as they were
trained."""
REFUSED: dict[str, tuple[object, str]] = {
    "container": (None, "this engine runs no code"),
    "mcp_servers": ([], "this engine calls no servers: offer their tools as tools of your own"),
    "speed": ("standard", NOT_HERE),
}
"""Field -> (the value that asks for nothing, why another one is refused)."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    """How long the model may think is not bounded: the number is checked, and has no effect."""
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_shown(self) -> bool:
        return self.type != "disabled" and self.display != "omitted"


class ToolChoiceParam(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    edits: list[dict[str, Any]] | None = None


class MessageParam(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /v1/messages/count_tokens takes."""

    model: str
    messages: list[MessageParam]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputSettings | None = None
    output_format: OutputFormat | None = None
    """The name of output_config.format before it had that place."""
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Without effect, here and in parts of the body: whatever was computed may be reused."""


class MessagesBody(CountBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    """As far as the context has room."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    container: Any = None
    speed: str | None = None
    metadata: dict[str, Any] | None = None
    """Without effect, like the next ones: they concern accounts and places."""
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


def check_body(body: CountBody) -> None:
    """Raise APIError for the first field that asks for what this server does not do."""
    for name, (harmless, why) in REFUSED.items():
        if getattr(body, name, None) not in (None, harmless):
            raise unsupported(name, why)
    for edit in (body.context_management and body.context_management.edits) or ():
        kind = str(edit.get("type"))
        if not kind.startswith(OF_THINKING):
            raise unsupported("context_management", f"{safe_text(kind)} is an edit that this server does not do")
    if body.output_format is not None and body.output_config is not None and body.output_config.format is not None:
        raise invalid("output_format is an older name of output_config.format: give one of them", "output_format")
    if isinstance(body, MessagesBody):
        _check_numbers(body)


def _check_numbers(body: MessagesBody) -> None:
    if body.max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {body.max_tokens}", "max_tokens")
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and not MIN_BUDGET <= budget < body.max_tokens:
        raise invalid(
            f"thinking.budget_tokens must be at least {MIN_BUDGET} and less than max_tokens, got {budget}", "thinking"
        )
    if body.temperature is not None and not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise invalid(f"temperature must be between 0 and {MAX_TEMPERATURE:g}, got {body.temperature}", "temperature")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise invalid(f"top_p must be above 0 and at most 1, got {body.top_p}", "top_p")
    stops = body.stop_sequences or ()
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(
            f"stop_sequences may have {MAX_STOPS} entries of 1 to {MAX_STOP_CHARS} characters", "stop_sequences"
        )
