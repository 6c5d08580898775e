"""The settings of an OpenAI server, as the command line gives them and as its process receives them: JSON in a file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from inflight.errors import ConfigurationError
from inflight.output_config import Pooled

LOOPBACK = "127.0.0.1"
TOOL_PARSERS = (
    "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "kimi_k2", "glm45", "glm47", "minimax_m2", "granite", "functiongemma",
    "gemma4", "phi4_mini_json", "lfm2", "olmo3", "nemotron", "xlam", "hunyuan_a13b", "seed_oss", "step3",
    "internlm", "longcat", "harmony", "ernie45", "granite4", "qwen3_xml", "mimo", "llama4_json", "llama4_pythonic",
    "nemotron_json", "openai",
)  # fmt: skip
"""By vLLM's names of its parsers, where it has one."""
Pooling = Literal["", "mean", "weighted_mean", "cls", "last", "max"]
REASONING_PARSERS = ("deepseek_r1", "gemma4", "mistral", "qwen3", "seed_oss", "harmony")


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is a model's own on a server of several; each field is that of OpenAIOptions with this name."""

    engine: str
    parameters: dict[str, str] = {}
    served_model_names: list[str] = []
    chat_template_kwargs: list[str] = []
    embedding_pooling: Pooling = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    pooled: Pooled = ""
    is_on_demand: bool = False
    """Whether its engine is loaded when somebody asks, and may be unloaded when nobody does; else at the start."""


class OpenAIOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field has the default of the command without options."""

    engine: str = "llm"
    """Name of the engine, by which its ranks are found, and of the model unless `served_model_names` has others."""
    launches_ranks: bool = False
    """Whether this server launches the engine's ranks, which end with it; else another program has."""
    parameters: dict[str, str] = {}
    """The engine's configuration, as in config.pbtxt: the folders of checkpoint, tokenizer and adapters, and limits."""
    host: str = LOOPBACK
    """Interface to listen on. Use others than loopback in closed networks only, or with keys."""
    port: int = 9000
    """TCP port; 0 = a free one."""
    served_model_names: list[str] = []
    """Names that `model` of a request may have; empty = the engine's name."""
    api_key_file: str = ""
    """File with a key in each line, in clear or as sha256: and 64 hexadecimal digits; "" = everybody may ask."""
    max_body_bytes: int = 16 * 2**20
    """Longest body of a request."""
    max_open_requests: int = 1024
    """HTTP requests in progress at the same time; more are refused with 503."""
    max_connections: int = 2048
    """TCP connections at the same time. Another one takes the place of the one that is idle longest; if none is idle,
    it is answered with 503 and closed."""
    max_connections_per_address: int = 1024
    """Of them from one address (of IPv6 its first 64 bits), likewise. Behind a proxy all have the proxy's."""
    max_requests_per_second: float = 0.0
    """Of each key, or of all clients together without keys; more are refused with 429. 0 = no limit."""
    max_request_seconds: float = 0.0
    """Time that the engine may take for a request; what came until then is answered. 0 = no limit."""
    chat_template_kwargs: list[str] = []
    """Names that requests may set in `chat_template_kwargs`."""
    allow_lora_updates: bool = False
    """Whether clients may load LoRA adapters from folders of this machine, and unload them."""
    embedding_pooling: Pooling = ""
    """What /v1/embeddings makes of the hidden states behind a text's tokens: their mean, their mean with the tokens'
    positions as weights, or the last of them; "" = as sentence-transformers' files in the checkpoint say, else the
    mean."""
    tool_parser: str = ""
    """One of TOOL_PARSERS: how the model writes calls of tools; "" = as the chat template does, if that is certain."""
    reasoning_parser: str = ""
    """One of REASONING_PARSERS: how the model marks its reasoning; "" = all of its text is the answer, but for
    the family harmony, whose messages say it."""
    max_stored_responses: int = 1000
    """Responses that are kept in memory for GET and for `previous_response_id`; 0 = none."""
    max_stored_response_bytes: int = 64 * 2**20
    """Of all of them together, each with its whole conversation; 0 = none."""
    pooled: Pooled = ""
    """What the model gives of a text if it writes none, as far as its files say; the engine says so once it serves."""
    drain_seconds: float = 30.0
    """Time that requests in flight have to finish after SIGTERM."""
    models: list[ModelOptions] = []
    """The models of a server of several, instead of the fields above that are theirs."""
    unload_after_seconds: float = 0.0
    """Without a request after which an engine that is loaded on demand is unloaded, if no client says otherwise; 0 =
    never."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_open_requests", "max_connections", "max_connections_per_address"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_stored_responses", "max_stored_response_bytes"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("max_requests_per_second", "max_request_seconds", "drain_seconds", "unload_after_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a finite number of at least 0, got {getattr(self, name)}")
        for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in ("", *known):
                raise ConfigurationError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)}")
        if not 0 <= self.port < 2**16:
            raise ConfigurationError(f"the OpenAI server's port must be between 0 and 65535, got {self.port}")
        if not all(self.served_model_names):
            raise ConfigurationError("a served model name must not be empty")

    @property
    def model_names(self) -> list[str]:
        """The names of the model, the one that answers have first."""
        return self.served_model_names or [self.engine]

    def of_each(self) -> list[OpenAIOptions]:
        """The options of each model, as if it were the only one."""
        own = ModelOptions.__struct_fields__
        given = [{name: getattr(each, name) for name in own if name != "is_on_demand"} for each in self.models]
        return [structs.replace(self, models=[], **fields) for fields in given] or [self]

    def with_settings(self, texts: Mapping[str, str]) -> OpenAIOptions:
        """With some fields replaced, as a command line gives them; lists have commas. Raises ConfigurationError."""
        values = structs.asdict(self)
        for key, text in texts.items():
            if key not in SETTABLE:
                near = difflib.get_close_matches(key, SETTABLE, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(SETTABLE)}"
                raise ConfigurationError(f"unknown key {key} of the OpenAI server; {hint}")
            values[key] = [part.strip() for part in text.split(",")] if isinstance(values[key], list) else text
        try:
            return msgspec.convert(values, OpenAIOptions, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"an option of the OpenAI server is wrong: {error}") from None

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> OpenAIOptions:
        """Raises ConfigurationError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"{path} does not hold the options of an OpenAI server: {error}") from None


OF_A_MODEL = ("served_model_names", "chat_template_kwargs", "embedding_pooling", "tool_parser", "reasoning_parser")
"""What each of several models may have for itself."""
SETTABLE = (
    "served_model_names",
    "max_body_bytes",
    "max_open_requests",
    "max_connections",
    "max_connections_per_address",
    "max_requests_per_second",
    "max_request_seconds",
    "chat_template_kwargs",
    "allow_lora_updates",
    "embedding_pooling",
    "tool_parser",
    "reasoning_parser",
    "max_stored_responses",
    "max_stored_response_bytes",
)
"""What `--openai-set` takes; the other fields have options of their own."""
