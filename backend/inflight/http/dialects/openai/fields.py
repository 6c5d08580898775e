"""The bodies of requests, as OpenAI and vLLM have them. null counts as not given.

A field is honoured, listed in REFUSED with the reason, or unknown, which is an error as well. Knows no tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inflight.asking.tools.tool import Tool
from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.body import NOT_HERE
from inflight.output_config import MAX_LOG_PROBS
from inflight.request import MAX_ALLOTTED_MS
from inflight.text.safe_text import safe_text

IN_MEMORY = ("in_memory", "in-memory")
"""prompt_cache_retention of prefixes that are kept as long as there is room, as all are here."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Of type structural_tag it is the guide itself, with fields of XGrammar's own."""

    type: str
    json_schema: JsonSchema | None = None


class Structure(msgspec.Struct, frozen=True):
    begin: str
    schema: dict[str, Any]
    end: str


class TriggeredStructures(msgspec.Struct, frozen=True):
    """Tags in free text, of the older form of type structural_tag."""

    structures: list[Structure]
    triggers: list[str]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    """Without effect: objects have no other properties than those that are named, unless they say so."""
    whitespace_pattern: str | None = None
    backend: str | None = None
    strict: bool | None = None
    """Ours: False leaves out what cannot be enforced, and names it."""


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Tool


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionName


class OfferedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `tools`, by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[OfferedFunction]


class AllowedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """The model is told of all tools, and calls none but these."""

    allowed_tools: AllowedTools


class TextBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all bodies that ask for text have in common."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: str | None = None
    allotted_time_ms: int | None = None


class Body(TextBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    # Ours
    guided_white_space: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    stream_interval: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # OpenAI's
    metadata: dict[str, str] | None = None
    best_of: int | None = None


class CompletionBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ChatBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    reasoning: Any = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    service_tier: str | None = None
    store: bool | None = None
    web_search_options: Any = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    mm_processor_kwargs: Any = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, with `prompt` or with `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter"""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    model: str | None = None
    """The base of the adapter, where a server has several models."""


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None
    """As of LoadAdapterBody."""


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": (("",), "the engine continues texts, it does not fill gaps"),
    "use_beam_search": ((False,), "ask tritonserver's model `llm` for beams"),
    "length_penalty": ((1, 1.0), "it belongs to beam search: ask tritonserver's model `llm` for beams"),
    "prompt_logprobs": ((), "use echo with logprobs of /v1/completions"),
    "stream_interval": ((1,), "a stream's chunks hold all tokens that have come"),
    "spaces_between_special_tokens": ((True,), "special tokens are written as they are"),
    "chat_template": ((), "templates come from the checkpoint alone, because they are programs"),
    "documents": (([],), NOT_HERE),
    "echo": ((False,), "chat completions hold the answer alone"),
    "functions": ((), "it was replaced by tools"),
    "function_call": (("none",), "it was replaced by tool_choice"),
    "reasoning": ((), "set what the chat template knows in chat_template_kwargs"),
    "thinking_token_budget": ((), NOT_HERE),
    "audio": ((), "this engine writes text"),
    "modalities": ((["text"],), "this engine writes text"),
    "prediction": ((), "tritonserver's model `llm` takes draft_input_ids"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "chat completions are not kept: /v1/responses are"),
    "web_search_options": ((), NOT_HERE),
    "verbosity": (("medium",), NOT_HERE),
    "prompt_cache_retention": (IN_MEMORY, "tritonserver's model `llm` takes retention tensors"),
    "mm_processor_kwargs": ((), "images are read as the checkpoint's own processor has it"),
}
"""Field -> the values that ask for nothing, and why others are refused."""

ACCEPTED_UNUSED = ("user", "safety_identifier", "prompt_cache_key", "metadata")
"""They change no answer: they name the client's own user or note something for it, or help caches to find equal
prefixes, which are always shared here."""

LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "top_logprobs": (0, MAX_LOG_PROBS),
    "allotted_time_ms": (1, MAX_ALLOTTED_MS),
}
"""Field -> the least and the greatest number that it takes; of OpenAI's own fields those that OpenAI does."""
MAX_COMPLETION_LOG_PROBS = 5
MAX_LOGIT_BIAS = 100
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


def check_fields(body: Body) -> None:
    """Raise APIError for the first field that is set and not honoured, or is beyond its limits."""
    for name, (harmless, why) in REFUSED.items():
        if name == "echo" and isinstance(body, CompletionBody):
            continue
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            raise unsupported(name, why)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "set n")
    check_limits(body, body.metadata)
    if isinstance(body, CompletionBody):
        check_number("logprobs", body.logprobs, 0, MAX_COMPLETION_LOG_PROBS)


def check_limits(body: TextBody, metadata: dict[str, str] | None) -> None:
    """Raise APIError for the first field that is beyond OpenAI's limits."""
    for name, (low, high) in LIMITS.items():
        check_number(name, getattr(body, name, None), low, high)
    for token, bias in (body.logit_bias or {}).items():
        check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, f" for token {safe_text(token, 32)}")
    check_metadata(metadata or {})


def check_number(name: str, value: float | None, low: float, high: float, what: str = "") -> None:
    """Raise APIError if it is given and outside [low, high]. `what`: which of several it is."""
    if value is not None and not low <= value <= high:
        raise invalid(f"{name} must be between {low} and {high}, got {value}{what}", name)


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise APIError if it is larger than OpenAI takes it."""
    is_short = all(
        len(key) <= MAX_METADATA_KEY_CHARS and len(value) <= MAX_METADATA_VALUE_CHARS for key, value in metadata.items()
    )
    if len(metadata) > MAX_METADATA or not is_short:
        raise invalid(
            f"metadata may have {MAX_METADATA} keys of {MAX_METADATA_KEY_CHARS} characters and values of "
            f"{MAX_METADATA_VALUE_CHARS}",
            "metadata",
        )


def check_stream_options(body: Body) -> bool:
    """Whether a stream ends with its usage. Raises APIError."""
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if options.continuous_usage_stats:
        raise unsupported("stream_options.continuous_usage_stats", "usage comes once, at the end")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", NOT_HERE)
    return bool(options.include_usage)
