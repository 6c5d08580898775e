"""The engine's configuration: read once from `config.pbtxt` parameters, checked with words, then final.

Keys are TensorRT-LLM's where it has one, so that its users and Model Analyzer's sweeps know them. An empty value or
an unfilled `${name}` means unset; an unknown key is an error that names the nearest known one.
Knows nothing of tritonserver: it is given plain strings.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path

from inflight.errors import ConfigurationError


class SchedulerPolicy(str, Enum):
    """Who may start, and whether what has started may be paused."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"
    STATIC_BATCH = "static_batch"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One field per key; the sentence under a field is what README's configuration table says."""

    gpt_model_path: str = "checkpoint"
    """Hugging Face checkpoint folder; a relative path starts at the model's version folder."""
    tokenizer_dir: str = ""
    """Folder of the tokenizer; unset = the checkpoint folder."""
    gpt_model_type: str = "inflight_fused_batching"
    """inflight_batching or inflight_fused_batching, the same here; V1 is refused."""
    model_impl: str = "auto"
    """Who computes: native (layers of this engine), transformers (its modelling code) or auto (native where it can)."""
    dtype: str = "auto"
    """auto (the checkpoint's), float32, bfloat16 or float16: type of weights, activations and KV cache."""
    device: str = "auto"
    """auto (cuda where there is one), cpu or cuda."""

    executor: str = "auto"
    """How ranks are started: auto (uniproc for one rank, mpi for more), uniproc or mpi."""
    tensor_parallel_size: int = 1
    """Ranks that share every layer."""
    gpu_device_ids: str = ""
    """Comma-separated device of each rank; unset = rank number."""
    mpi_hostfile: str = ""
    """Hostfile for mpiexec; unset = all ranks on this machine."""
    worker_heartbeat_timeout_ms: int = 10_000
    """Ranks that are silent for longer count as hung and are relaunched."""
    worker_start_timeout_ms: int = 600_000
    """Ranks must be ready this long after their launch."""

    max_batch_size: int = 64
    """Sequences in one step (tritonserver's own max_batch_size stays 0)."""
    max_num_tokens: int = 2048
    """Tokens in one step, prompt chunks included."""
    max_seq_len: int = 0
    """Prompt plus new tokens of a sequence; 0 = the checkpoint's max_position_embeddings."""
    max_input_len: int = 0
    """Prompt tokens of a request; 0 = max_seq_len - 1."""
    max_queue_size: int = 0
    """Requests waiting beyond those being served; more are refused at once; 0 = no limit."""
    enable_chunked_context: bool = True
    """Long prompts are computed in chunks beside running decodes; false = whole, so at most max_num_tokens long."""
    batch_scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    """guaranteed_no_evict, max_utilization or static_batch."""

    tokens_per_block: int = 16
    """KV cache block size, a power of two."""
    max_tokens_in_paged_kv_cache: int = 0
    """KV cache size in tokens; with a memory fraction the smaller holds; 0 = by fraction alone."""
    kv_cache_free_gpu_mem_fraction: float = 0.0
    """Fraction of the memory free after loading; 0 = 0.9 on a GPU; on a CPU 0.2, up to 4 GiB and a full batch's."""
    enable_kv_cache_reuse: bool = True
    """Share blocks of equal prefixes between requests of the same salt."""

    cpu_compile: str = "auto"
    """Layers in C++: auto (one bfloat16 rank, a CPU with AVX-512 for bfloat16, g++ at hand), true or false."""
    num_threads: int = 0
    """Threads of one rank on CPU; 0 = cores divided by ranks."""

    generation_config: str = "auto"
    """auto takes what a request leaves open from the checkpoint's generation_config.json; none does not."""
    exclude_input_in_output: bool = False
    """Leave the prompt out of non-streamed output; a request's own flag wins."""
    max_responses_per_second: int = -1
    """To streams under way, all together; 0 = no limit; -1 = 60 a core on CPU, else none. Tokens in between wait."""
    cancellation_check_period_ms: int = 100
    """How often requests are asked whether their client has left."""
    stats_check_period_ms: int = 100
    """How often metrics are brought up to date."""
    max_text_bytes: int = 1_048_576
    """Longest text_input in bytes, checked before it is tokenised; less where max_input_len surely holds less."""
    log_level: str = "INFO"
    """Level of the ranks' log: DEBUG, INFO, WARNING or ERROR."""

    def __post_init__(self) -> None:
        if self.gpt_model_type == "V1":
            raise ConfigurationError("gpt_model_type: Static batching type is deprecated; use inflight_fused_batching")
        _one_of("gpt_model_type", self.gpt_model_type, ("inflight_batching", "inflight_fused_batching"))
        _one_of("model_impl", self.model_impl, ("auto", "native", "transformers"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("executor", self.executor, ("auto", "uniproc", "mpi"))
        _one_of("cpu_compile", self.cpu_compile, ("auto", "true", "false"))
        _one_of("generation_config", self.generation_config, ("auto", "none"))
        _one_of("log_level", self.log_level, ("DEBUG", "INFO", "WARNING", "ERROR"))
        for key in POSITIVE_KEYS:
            if getattr(self, key) < 1:
                raise ConfigurationError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key, largest in LARGEST.items():
            if getattr(self, key) > largest:
                raise ConfigurationError(f"{key} must be at most {largest}, got {getattr(self, key)}")
        for key in ("max_seq_len", "max_input_len", "max_queue_size", "max_tokens_in_paged_kv_cache", "num_threads"):
            if getattr(self, key) < 0:
                raise ConfigurationError(f"{key} must not be negative, got {getattr(self, key)}")
        if self.max_responses_per_second < -1:
            raise ConfigurationError(
                f"max_responses_per_second must be -1 (the default), 0 (no limit) or more, "
                f"got {self.max_responses_per_second}"
            )
        if self.tokens_per_block < 1 or self.tokens_per_block & (self.tokens_per_block - 1):
            raise ConfigurationError(f"tokens_per_block must be a power of two, got {self.tokens_per_block}")
        if not 0.0 <= self.kv_cache_free_gpu_mem_fraction <= 1.0:
            raise ConfigurationError(
                f"kv_cache_free_gpu_mem_fraction must be between 0 and 1, got {self.kv_cache_free_gpu_mem_fraction}"
            )
        if self.max_num_tokens < self.max_batch_size:
            raise ConfigurationError(
                f"max_num_tokens ({self.max_num_tokens}) must be at least max_batch_size ({self.max_batch_size}): "
                "every running sequence needs one token a step"
            )
        if self.executor == "uniproc" and self.tensor_parallel_size > 1:
            raise ConfigurationError("executor uniproc runs one rank; set executor to mpi for tensor_parallel_size > 1")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], model_directory: str | Path = ".") -> EngineConfig:
        """Build from `config.pbtxt` parameters (key -> string value).

        `model_directory` is the model's version folder, where relative paths start.
        Raises ConfigurationError naming the key and the remedy.
        """
        hints = typing.get_type_hints(cls)
        known = {field.name for field in fields(cls)}
        values: dict[str, object] = {}
        for key, text in parameters.items():
            if not is_set(text) or key in TRITONSERVER_KEYS:
                continue
            if key in UNSUPPORTED_KEYS:
                _check_unsupported(key, text)
            elif key in known:
                values[key] = _parse(key, text.strip(), hints[key])
            else:
                near = difflib.get_close_matches(key, [*known, *UNSUPPORTED_KEYS], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigurationError(f"unknown parameter {key}{hint}")
        config = cls(**values)  # type: ignore[arg-type]
        checkpoint = Path(model_directory, config.gpt_model_path)
        tokenizer = Path(model_directory, config.tokenizer_dir) if config.tokenizer_dir else checkpoint
        return replace(config, gpt_model_path=str(checkpoint), tokenizer_dir=str(tokenizer))

    @property
    def max_in_flight(self) -> int:
        """Requests that may be served or wait at the same time; 0 = no limit."""
        return self.max_batch_size + self.max_queue_size if self.max_queue_size else 0

    @property
    def launcher(self) -> str:
        """How ranks are started: `executor`, with auto decided."""
        if self.executor != "auto":
            return self.executor
        return "mpi" if self.tensor_parallel_size > 1 else "uniproc"

    def to_parameters(self) -> dict[str, str]:
        """The inverse of from_parameters: strings that read back to an equal configuration."""
        return {key: value.value if isinstance(value, Enum) else str(value) for key, value in asdict(self).items()}


POSITIVE_KEYS = (
    "tensor_parallel_size",
    "max_batch_size",
    "max_num_tokens",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "max_text_bytes",
    "worker_heartbeat_timeout_ms",
    "worker_start_timeout_ms",
)

LARGEST = {
    "tensor_parallel_size": 2**12,
    "max_batch_size": 2**14,
    "max_num_tokens": 2**24,
    "tokens_per_block": 2**16,
    "num_threads": 2**10,
    "max_tokens_in_paged_kv_cache": 2**48,
    **dict.fromkeys(
        (
            "max_seq_len",
            "max_input_len",
            "max_queue_size",
            "max_responses_per_second",
            "max_text_bytes",
            "cancellation_check_period_ms",
            "stats_check_period_ms",
            "worker_heartbeat_timeout_ms",
            "worker_start_timeout_ms",
        ),
        2**31 - 1,
    ),
}
"""Beyond any use, and within what threads, clocks and 64 bits can do. Memory is compared where it is taken."""

TRITONSERVER_KEYS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})
"""Parameters that tritonserver's Python backend reads itself."""

UNSUPPORTED_KEYS: dict[str, tuple[str, ...] | None] = {
    "max_beam_width": ("1",),
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p"),
    "enable_trt_overlap": ("false",),
    "kv_cache_host_memory_bytes": ("0",),
    "kv_cache_onboard_blocks": ("true",),
    "max_attention_window_size": (),
    "sink_token_length": (),
    "cross_kv_cache_fraction": (),
    "encoder_model_path": (),
    "medusa_choices": (),
    "eagle_choices": (),
    "lookahead_window_size": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
    "lora_prefetch_dir": (),
    "guided_decoding_backend": (),
    "xgrammar_tokenizer_info_path": (),
    "speculative_decoding_fast_logits": ("false",),
    "gpu_weights_percent": ("1", "1.0"),
    "participant_ids": (),
    "num_nodes": ("1",),
    "normalize_log_probs": ("true",),
    "multi_block_mode": ("true",),
    "enable_context_fmha_fp32_acc": ("false", "true"),
    "cuda_graph_mode": ("false", "true"),
    "cuda_graph_cache_size": None,
    "recv_poll_period_ms": None,
    "iter_stats_max_iterations": None,
    "request_stats_max_iterations": None,
    "lora_cache_optimal_adapter_size": None,
    "lora_cache_max_adapter_size": None,
    "lora_cache_gpu_memory_fraction": None,
    "lora_cache_host_memory_bytes": None,
    "executor_worker_path": None,
}
"""TensorRT-LLM's keys for what this engine does not do: values that ask for nothing are accepted; None accepts any,
because the key only tunes something that is not there."""


def is_set(text: str) -> bool:
    """False for an empty value and for a template's unfilled `${name}`."""
    return bool(text.strip()) and not re.fullmatch(r"\$\{\w+\}", text.strip())


def _check_unsupported(key: str, text: str) -> None:
    harmless = UNSUPPORTED_KEYS[key]
    if harmless is not None and text.strip().lower() not in harmless:
        allowed = f" (only {' or '.join(harmless)})" if harmless else ""
        raise ConfigurationError(f"{key}: this engine does not support {text!r}{allowed}; leave it unset")


def _parse(key: str, text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() in ("true", "1"):
            return True
        if text.lower() in ("false", "0"):
            return False
        raise ConfigurationError(f"{key} must be true or false, got {text!r}")
    if kind is SchedulerPolicy:
        _one_of(key, text.lower(), tuple(policy.value for policy in SchedulerPolicy))
        return SchedulerPolicy(text.lower())
    try:
        return kind(text)
    except ValueError:
        word = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise ConfigurationError(f"{key} must be {word}, got {text!r}") from None


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")
