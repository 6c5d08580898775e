"""Entries that the tables of several dialects share.

Knows what tensors mean that TensorRT-LLM's models and ours have under the same name; no whole dialect.
"""

from __future__ import annotations

from inflight.server.tensors.dialect import InputTensor, OutputTensor, Reader, TensorType
from inflight.server.tensors.tensor_values import (
    read_bytes,
    read_drafts,
    read_embeddings,
    read_float32_bytes,
    read_matrix,
    read_numbers,
    read_prompt_ids,
    read_scalar,
    read_seed,
)

NO_MEDIA = "this model reads text, token ids and embeddings; llm and vllm_model read images, in their tensor image"
NO_ENCODER = "this engine serves decoders only"


def scalar(name: str, dtype: TensorType, field: str = "", read: Reader = read_scalar) -> InputTensor:
    return InputTensor(name=name, dtype=dtype, dims=(1,), field=field or name, read=read)


def row(name: str, dtype: TensorType, read: Reader, field: str = "") -> InputTensor:
    return InputTensor(name=name, dtype=dtype, dims=(-1,), field=field or name, read=read)


def embeddings(name: str, dtype: TensorType) -> InputTensor:
    return InputTensor(name=name, dtype=dtype, dims=(-1, -1), field=name, read=read_embeddings)


def refused(name: str, dtype: TensorType, rank: int, reason: str, *neutral: object) -> InputTensor:
    """Refused with `reason` unless it is empty, or one of the neutral values."""
    return InputTensor(name=name, dtype=dtype, dims=(-1,) * rank, reason=reason, neutral=neutral)


def ignored(name: str, dtype: TensorType, reason: str) -> InputTensor:
    return InputTensor(name=name, dtype=dtype, dims=(1,), reason=reason, neutral=None)


def output(name: str, dtype: TensorType, rank: int, value: str, asked_by: str = "") -> OutputTensor:
    return OutputTensor(name=name, dtype=dtype, dims=(-1,) * rank, value=value, asked_by=asked_by)


def single(name: str, dtype: TensorType, asked_by: str, value: str = "") -> OutputTensor:
    return OutputTensor(name=name, dtype=dtype, dims=(1,), value=value or name, asked_by=asked_by)


def metric(name: str, dtype: TensorType) -> OutputTensor:
    return single(name, dtype, "return_perf_metrics", f"perf_metrics.{name}")


CONTEXT_PHASE_PARAMS = row("context_phase_params", TensorType.UINT8, read_bytes)
CONTEXT_PHASE_OUTPUT = OutputTensor(
    name="context_phase_params",
    dtype=TensorType.UINT8,
    dims=(-1,),
    value="context_phase_params",
    asked_by="is_context_only",
    by_name={},
)
SEED = scalar("seed", TensorType.UINT64, read=read_seed)
LEGACY = (
    scalar("min_length", TensorType.INT32, "min_tokens"),
    scalar("random_seed", TensorType.UINT64, "seed", read_seed),
)
"""Names that TensorRT-LLM has given up and clients still send."""
PROMPT_TABLE = (
    embeddings("prompt_embedding_table", TensorType.FP16),
    scalar("prompt_vocab_size", TensorType.INT32),
)
PENALTIES = (
    scalar("repetition_penalty", TensorType.FP32),
    scalar("presence_penalty", TensorType.FP32),
    scalar("frequency_penalty", TensorType.FP32),
)
EMBEDDING_BIAS = row("embedding_bias", TensorType.FP32, read_float32_bytes)
PROMPT_TABLE_EXTRA_IDS = row("prompt_table_extra_ids", TensorType.UINT64, read_prompt_ids)
GUIDED_DECODING = (
    scalar("guided_decoding_guide_type", TensorType.STRING, "guide_type"),
    scalar("guided_decoding_guide", TensorType.STRING, "guide"),
)
GUIDE_OPTIONS = (
    scalar("guided_decoding_strict", TensorType.BOOL, "guide_is_strict"),
    scalar("guided_decoding_white_space", TensorType.STRING, "guide_white_space"),
)
"""Ours alone: TensorRT-LLM's models have none of this, here they are beside theirs."""
GUIDE_NOT_ENFORCED = OutputTensor(
    name="guided_decoding_not_enforced",
    dtype=TensorType.STRING,
    dims=(-1,),
    value="guide_not_enforced",
    asked_by="may_leave_out",
    by_name={},
)
DRAFTS = (
    row("draft_input_ids", TensorType.INT32, read_drafts),
    InputTensor(name="draft_logits", dtype=TensorType.FP32, dims=(-1, -1), field="draft_logits", read=read_matrix),
    scalar("draft_acceptance_threshold", TensorType.FP32),
    scalar("lookahead_window_size", TensorType.INT32),
    scalar("lookahead_ngram_size", TensorType.INT32),
    scalar("lookahead_verification_set_size", TensorType.INT32),
)
LORA_TENSORS = (
    scalar("lora_task_id", TensorType.UINT64),
    InputTensor(name="lora_weights", dtype=TensorType.FP16, dims=(-1, -1), field="lora_weights", read=read_matrix),
    InputTensor(name="lora_config", dtype=TensorType.INT32, dims=(-1, 3), field="lora_config", read=read_matrix),
)
RETENTION = (
    row("retention_token_range_starts", TensorType.INT32, read_numbers, "retention_starts"),
    row("retention_token_range_ends", TensorType.INT32, read_numbers, "retention_ends"),
    row("retention_token_range_priorities", TensorType.INT32, read_numbers, "retention_priorities"),
    row("retention_token_range_durations_ms", TensorType.INT32, read_numbers, "retention_durations_ms"),
    scalar("retention_decode_priority", TensorType.INT32),
    scalar("retention_decode_duration_ms", TensorType.INT32),
)

LOG_PROBS = (
    output("cum_log_probs", TensorType.FP32, 1, "cum_log_prob", "return_log_probs"),
    output("output_log_probs", TensorType.FP32, 2, "log_probs", "return_log_probs"),
)
LOGITS = (
    output("context_logits", TensorType.FP32, 2, "context_logits", "return_context_logits"),
    output("generation_logits", TensorType.FP32, 3, "generation_logits", "return_generation_logits"),
)
SEQUENCE_INDEX = OutputTensor(
    name="sequence_index",
    dtype=TensorType.INT32,
    dims=(1,),
    value="sequence_index",
    asked_by="num_return_sequences",
    by_name={},
)
BATCH_INDEX = OutputTensor(
    name="batch_index",
    dtype=TensorType.INT32,
    dims=(1,),
    value="batch_index",
    asked_by="is_one_of_several",
    by_name={},
)
NUM_TOKENS = (
    single("num_input_tokens", TensorType.INT32, "return_num_input_tokens"),
    single("num_output_tokens", TensorType.INT32, "return_num_output_tokens"),
)
PERF_METRICS = (
    metric("arrival_time_ns", TensorType.INT64),
    metric("first_scheduled_time_ns", TensorType.INT64),
    metric("first_token_time_ns", TensorType.INT64),
    metric("last_token_time_ns", TensorType.INT64),
    metric("kv_cache_alloc_total_blocks", TensorType.INT32),
    metric("kv_cache_alloc_new_blocks", TensorType.INT32),
    metric("kv_cache_reused_blocks", TensorType.INT32),
    metric("acceptance_rate", TensorType.FP32),
    metric("total_accepted_draft_tokens", TensorType.INT32),
    metric("total_draft_tokens", TensorType.INT32),
)
