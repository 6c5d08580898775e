"""What the keys of `config.pbtxt` may hold: bounds, TensorRT-LLM's keys without effect here, and how text is read."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from inflight.errors import ConfigurationError
from inflight.kv_cache_retention import MAX_PRIORITY
from inflight.speculative_decoding import MAX_DRAFT_LEN, MAX_NGRAM_SIZE, MAX_VERIFICATION_SET_SIZE, MAX_WINDOW_SIZE

POSITIVE_KEYS = (
    "tensor_parallel_size",
    "moe_expert_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "max_text_bytes",
    "max_tensor_bytes_per_request",
    "worker_heartbeat_timeout_ms",
    "worker_start_timeout_ms",
    "kv_transfer_timeout_ms",
    "journal_max_deaths",
    "max_matching_ngram_size",
    "state_snapshot_interval",
    "lora_cache_max_adapter_size",
    "max_image_bytes",
    "max_image_pixels",
    "image_timeout_ms",
)

NOT_NEGATIVE_KEYS = (
    "max_batch_size",
    "max_num_tokens",
    "tokens_per_block",
    "max_beam_width",
    "max_seq_len",
    "max_input_len",
    "max_queue_size",
    "inter_token_latency_target_ms",
    "journal_max_tokens",
    "journal_max_replays",
    "spare_ranks",
    "context_replicas",
    "max_tokens_in_buffer",
    "max_tokens_in_paged_kv_cache",
    "kv_cache_host_memory_bytes",
    "secondary_offload_min_priority",
    "num_state_snapshots",
    "event_buffer_max_size",
    "num_threads",
    "max_loras",
    "lora_cache_host_memory_bytes",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    "max_draft_len",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "speculative_max_draft_len",
    "max_prompt_embedding_bytes",
    "max_images",
    "max_image_cache_bytes",
)

LARGEST = {
    "tensor_parallel_size": 2**12,
    "moe_expert_parallel_size": 2**12,
    "pipeline_parallel_size": 2**10,
    "data_parallel_size": 2**8,
    "max_batch_size": 2**14,
    "spare_ranks": 2**4,
    "context_replicas": 2**8 - 1,
    "max_tokens_in_buffer": 2**48,
    "max_beam_width": 2**14,
    "max_num_tokens": 2**24,
    "tokens_per_block": 2**16,
    "num_threads": 2**10,
    "max_loras": 2**14,
    "lora_cache_max_adapter_size": 128,
    "lora_cache_host_memory_bytes": 2**48,
    "iter_stats_max_iterations": 2**20,
    "request_stats_max_iterations": 2**20,
    "max_draft_len": MAX_DRAFT_LEN,
    "speculative_max_draft_len": MAX_DRAFT_LEN,
    "max_matching_ngram_size": MAX_NGRAM_SIZE,
    "lookahead_window_size": MAX_WINDOW_SIZE,
    "lookahead_ngram_size": MAX_NGRAM_SIZE,
    "lookahead_verification_set_size": MAX_VERIFICATION_SET_SIZE,
    "max_tokens_in_paged_kv_cache": 2**48,
    "kv_cache_host_memory_bytes": 2**48,
    "event_buffer_max_size": 2**20,
    "state_snapshot_interval": 2**30,
    "num_state_snapshots": 2**20,
    "secondary_offload_min_priority": MAX_PRIORITY,
    "max_tensor_bytes_per_request": 2**48,
    "max_prompt_embedding_bytes": 48 * 2**20,  # a message to the leader may have 64 MiB
    "max_images": 2**8,
    "max_image_bytes": 2**30,
    "max_image_pixels": 2**30,
    "max_image_cache_bytes": 2**48,
    **dict.fromkeys(
        (
            "max_seq_len",
            "max_input_len",
            "max_queue_size",
            "inter_token_latency_target_ms",
            "journal_max_tokens",
            "journal_max_replays",
            "journal_max_deaths",
            "max_responses_per_second",
            "max_text_bytes",
            "cancellation_check_period_ms",
            "stats_check_period_ms",
            "worker_heartbeat_timeout_ms",
            "worker_start_timeout_ms",
            "kv_transfer_timeout_ms",
            "image_timeout_ms",
        ),
        2**31 - 1,
    ),
}
"""Upper bounds of integer keys: above any sensible use, below what threads, timers and 64-bit integers can represent.
Whether the memory suffices is checked where it is allocated."""

TRITONSERVER_KEYS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})
"""Parameters that tritonserver's Python backend reads itself."""

UNSUPPORTED_KEYS: dict[str, tuple[str, ...] | None] = {
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p"),
    "enable_trt_overlap": ("false",),
    "kv_cache_onboard_blocks": ("true",),
    "max_attention_window_size": (),
    "sink_token_length": (),
    "cross_kv_cache_fraction": (),
    "encoder_model_path": (),
    "medusa_choices": (),
    "eagle_choices": (),
    "lora_prefetch_dir": (),
    "xgrammar_tokenizer_info_path": (),
    "speculative_decoding_fast_logits": ("false",),
    "gpu_weights_percent": ("1", "1.0"),
    "participant_ids": (),
    "num_nodes": ("1",),
    "normalize_log_probs": ("true",),
    "multi_block_mode": ("true",),
    "enable_context_fmha_fp32_acc": ("false", "true"),
    "cuda_graph_cache_size": None,
    "recv_poll_period_ms": None,
    "lora_cache_optimal_adapter_size": None,
    "executor_worker_path": None,
}
"""TensorRT-LLM's keys for features that this engine does not have -> the values that are accepted because they do not
request the feature. None accepts any value, because the key only tunes a component that does not exist here."""


def is_set(text: str) -> bool:
    """False for an empty value and for a template's unfilled `${name}`."""
    return bool(text.strip()) and not re.fullmatch(r"\$\{\w+\}", text.strip())


def check_unsupported(key: str, text: str) -> None:
    """Raise ConfigurationError if one of the UNSUPPORTED_KEYS asks for its feature."""
    harmless = UNSUPPORTED_KEYS[key]
    if harmless is not None and text.strip().lower() not in harmless:
        allowed = f" (only {' or '.join(harmless)})" if harmless else ""
        raise ConfigurationError(f"{key}: this engine does not support {text!r}{allowed}; leave it unset")


def parse(key: str, text: str, kind: type[Any]) -> object:
    """The value of a key. `kind`: its type. Raises ConfigurationError if `text` is none of that."""
    if kind is bool:
        if text.lower() in ("true", "1"):
            return True
        if text.lower() in ("false", "0"):
            return False
        raise ConfigurationError(f"{key} must be true or false, got {text!r}")
    if issubclass(kind, Enum):
        one_of(key, text.lower(), tuple(each.value for each in kind))
        return kind(text.lower())
    try:
        return kind(text)
    except ValueError:
        word = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise ConfigurationError(f"{key} must be {word}, got {text!r}") from None


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigurationError unless `value` is allowed."""
    if value not in allowed:
        raise ConfigurationError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")
