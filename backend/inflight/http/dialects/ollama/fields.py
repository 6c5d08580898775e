"""The bodies of POST /api/chat, /api/generate, /api/embed and /api/show. null counts as not given.

A field is honoured, listed in REFUSED with the reason, or without effect here. Unknown fields are left out, as Ollama
does; unknown options are errors. Knows no tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.asking.tools.tool import Tool
from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.ollama.keep_alive import KeepAlive
from inflight.text.safe_text import safe_text

REFUSED: dict[str, tuple[object, str]] = {
    "suffix": ("", "the engine continues texts, it does not fill gaps"),
    "template": ("", "the checkpoint has its own: send raw true and the whole prompt"),
    "context": ([], "send the conversation to /api/chat: equal prefixes are cached"),
    "width": (0, "this engine writes text"),
    "height": (0, "this engine writes text"),
    "steps": (0, "this engine writes text"),
}
"""Field -> (the value that asks for nothing, why another one is refused)."""
REFUSED_OPTIONS: dict[str, tuple[object, str]] = {
    "mirostat": (0, "this engine has no such sampling"),
    "tfs_z": (1.0, "this engine has no such sampling"),
}
UNUSED_OPTIONS = frozenset(
    (
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep", "mirostat_tau", "mirostat_eta"),
        *("penalize_newline", "draft_num_predict"),
    )
)
"""Of how Ollama loads a model, which is the operator's part here."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. What is not said is as in the checkpoint's generation_config.json."""

    seed: int | None = None
    num_predict: int | None = None
    """New tokens at most; -1 and -2 = as many as fit."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    temperature: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    function: Tool
    type: str | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and texts have in common."""

    model: str
    stream: bool | None = None
    """None = true."""
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    """json, or a JSON schema."""
    think: bool | str | None = None
    """Whether the model thinks before it answers, or how much: low, medium or high. None = as it does by itself."""
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[FunctionTool] | None = None


class GenerateBody(Body, frozen=True, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """The prompt is continued as it is, and is no message of a chat."""
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class EmbedBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    input: str | list[str]
    truncate: bool | None = None
    """None = true: texts that are too long are cut at the end."""
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    """Without effect: nothing is sampled."""
    keep_alive: KeepAlive = None


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embeddings, for one text."""

    model: str
    prompt: str | None = None
    options: dict[str, Any] | None = None
    """Without effect: nothing is sampled."""
    keep_alive: KeepAlive = None


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    name: str | None = None
    """What older clients call it."""


def check_body(body: Body) -> None:
    """Raise APIError for the first field that asks for what this server does not do."""
    for name, (harmless, why) in REFUSED.items():
        if getattr(body, name, None) not in (None, harmless):
            raise unsupported(name, why)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")


def read_options(given: dict[str, Any] | None) -> Options:
    """Raises APIError."""
    own = {}
    for name, value in (given or {}).items():
        if name in REFUSED_OPTIONS:
            harmless, why = REFUSED_OPTIONS[name]
            if value not in (None, harmless):
                raise unsupported(f"options.{name}", why)
        elif name not in UNUSED_OPTIONS:
            own[name] = value
    try:
        options = msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        raise invalid(f"options: {safe_text(str(error))}", "options") from None
    penalised = options.repeat_penalty not in (None, 1.0)
    if penalised and options.repeat_last_n not in (None, -1):
        raise unsupported("options.repeat_last_n", "repeat_penalty counts all tokens, as it does with -1")
    return options
