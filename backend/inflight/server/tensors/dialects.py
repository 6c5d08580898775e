"""The dialects that this backend speaks, as tables.

`llm` combines the tensor names of TensorRT-LLM's ensemble for text, those of its inner model for token ids, and what
users of vLLM expect besides (min_p, finish_reason). No batch dimension: config.pbtxt has max_batch_size 0.
"""

from __future__ import annotations

from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor, Reader, TensorType
from inflight.server.tensors.tensor_values import (
    read_drafts,
    read_embeddings,
    read_float32_bytes,
    read_matrix,
    read_numbers,
    read_prompt,
    read_prompt_ids,
    read_texts,
    read_token_ids,
    read_words,
)


def _scalar(name: str, dtype: TensorType, field: str = "") -> InputTensor:
    return InputTensor(name=name, dtype=dtype, dims=(1,), field=field or name)


def _unsupported(name: str, dtype: TensorType, *neutral: int | float) -> InputTensor:
    """Refused unless it holds a value that asks for nothing."""
    return InputTensor(name=name, dtype=dtype, dims=(1,), neutral=neutral)


def _metric(name: str, dtype: TensorType, value: str = "") -> OutputTensor:
    return OutputTensor(
        name=name, dtype=dtype, dims=(1,), value=f"perf_metrics.{value or name}", asked_by="return_perf_metrics"
    )


def _row(name: str, dtype: TensorType, read: Reader) -> InputTensor:
    return InputTensor(name=name, dtype=dtype, dims=(-1,), field=name, read=read)


def _embeddings(name: str, dtype: TensorType) -> InputTensor:
    return InputTensor(name=name, dtype=dtype, dims=(-1, -1), field=name, read=read_embeddings)


def _retention_row(name: str, field: str) -> InputTensor:
    return InputTensor(name=name, dtype=TensorType.INT32, dims=(-1,), field=field, read=read_numbers)


def _array(name: str, dtype: TensorType, rank: int, asked_by: str) -> OutputTensor:
    return OutputTensor(name=name, dtype=dtype, dims=(-1,) * rank, value=name, asked_by=asked_by)


LLM = Dialect(
    name="llm",
    required=(("text_input", "input_ids", "prompt_embeds"), ("max_tokens",)),
    inputs=(
        InputTensor(name="text_input", dtype=TensorType.STRING, dims=(1,), field="text", read=read_prompt),
        InputTensor(name="input_ids", dtype=TensorType.INT32, dims=(-1,), field="input_ids", read=read_token_ids),
        _embeddings("prompt_embeds", TensorType.FP32),
        _embeddings("prompt_embedding_table", TensorType.FP16),
        _scalar("prompt_vocab_size", TensorType.INT32),
        _row("prompt_table_extra_ids", TensorType.UINT64, read_prompt_ids),
        _scalar("max_tokens", TensorType.INT32),
        _scalar("stream", TensorType.BOOL),
        _scalar("temperature", TensorType.FP32),
        _scalar("top_k", TensorType.INT32),
        _scalar("top_p", TensorType.FP32),
        _scalar("min_p", TensorType.FP32),
        _scalar("typical_p", TensorType.FP32),
        _scalar("seed", TensorType.UINT64),
        _scalar("repetition_penalty", TensorType.FP32),
        _scalar("presence_penalty", TensorType.FP32),
        _scalar("frequency_penalty", TensorType.FP32),
        _scalar("min_tokens", TensorType.INT32),
        _scalar("num_return_sequences", TensorType.INT32),
        _scalar("beam_width", TensorType.INT32),
        _scalar("length_penalty", TensorType.FP32),
        _scalar("early_stopping", TensorType.INT32),
        _row("beam_width_array", TensorType.INT32, read_numbers),
        _scalar("beam_search_diversity_rate", TensorType.FP32),
        _scalar("no_repeat_ngram_size", TensorType.INT32),
        _scalar("top_p_decay", TensorType.FP32),
        _scalar("top_p_min", TensorType.FP32),
        _scalar("top_p_reset_ids", TensorType.INT32),
        _row("logit_bias_ids", TensorType.INT32, read_numbers),
        _row("logit_bias_values", TensorType.FP32, read_numbers),
        _row("embedding_bias", TensorType.FP32, read_float32_bytes),
        _row("embedding_bias_words", TensorType.STRING, read_texts),
        _row("embedding_bias_weights", TensorType.FP32, read_numbers),
        InputTensor(name="stop_words", dtype=TensorType.STRING, dims=(-1,), field="stop_words", read=read_words),
        InputTensor(name="bad_words", dtype=TensorType.STRING, dims=(-1,), field="bad_words", read=read_words),
        _scalar("end_id", TensorType.INT32),
        _scalar("pad_id", TensorType.INT32),
        _scalar("guided_decoding_guide_type", TensorType.STRING, "guide_type"),
        _scalar("guided_decoding_guide", TensorType.STRING, "guide"),
        _scalar("max_draft_len", TensorType.INT32),
        _scalar("max_matching_ngram_size", TensorType.INT32),
        _scalar("speculative_max_draft_len", TensorType.INT32),
        _row("draft_input_ids", TensorType.INT32, read_drafts),
        InputTensor(name="draft_logits", dtype=TensorType.FP32, dims=(-1, -1), field="draft_logits", read=read_matrix),
        _scalar("draft_acceptance_threshold", TensorType.FP32),
        _scalar("lookahead_window_size", TensorType.INT32),
        _scalar("lookahead_ngram_size", TensorType.INT32),
        _scalar("lookahead_verification_set_size", TensorType.INT32),
        _scalar("logits_post_processor_name", TensorType.STRING),
        _scalar("lora_name", TensorType.STRING),
        _scalar("lora_task_id", TensorType.UINT64),
        InputTensor(name="lora_weights", dtype=TensorType.FP16, dims=(-1, -1), field="lora_weights", read=read_matrix),
        InputTensor(name="lora_config", dtype=TensorType.INT32, dims=(-1, 3), field="lora_config", read=read_matrix),
        _scalar("lora_order", TensorType.STRING),
        _scalar("exclude_input_in_output", TensorType.BOOL),
        _scalar("return_log_probs", TensorType.BOOL),
        _scalar("num_log_probs", TensorType.INT32),
        _scalar("return_prompt_log_probs", TensorType.BOOL),
        _scalar("return_context_logits", TensorType.BOOL),
        _scalar("return_generation_logits", TensorType.BOOL),
        InputTensor(
            name="additional_outputs", dtype=TensorType.STRING, dims=(-1,), field="additional_outputs", read=read_words
        ),
        _scalar("gather_context", TensorType.BOOL),
        _scalar("return_num_input_tokens", TensorType.BOOL),
        _scalar("return_num_output_tokens", TensorType.BOOL),
        _scalar("return_perf_metrics", TensorType.BOOL),
        _retention_row("retention_token_range_starts", "retention_starts"),
        _retention_row("retention_token_range_ends", "retention_ends"),
        _retention_row("retention_token_range_priorities", "retention_priorities"),
        _retention_row("retention_token_range_durations_ms", "retention_durations_ms"),
        _scalar("retention_decode_priority", TensorType.INT32),
        _scalar("retention_decode_duration_ms", TensorType.INT32),
        _scalar("stop", TensorType.BOOL),
    ),
    outputs=(
        OutputTensor(name="text_output", dtype=TensorType.STRING, dims=(-1,), value="text"),
        OutputTensor(name="output_ids", dtype=TensorType.INT32, dims=(-1, -1), value="token_ids"),
        OutputTensor(name="sequence_length", dtype=TensorType.INT32, dims=(-1,), value="sequence_length"),
        OutputTensor(name="finish_reason", dtype=TensorType.STRING, dims=(-1,), value="finish_reason"),
        OutputTensor(
            name="sequence_index",
            dtype=TensorType.INT32,
            dims=(1,),
            value="sequence_index",
            asked_by="num_return_sequences",
        ),
        OutputTensor(
            name="cum_log_probs", dtype=TensorType.FP32, dims=(-1,), value="cum_log_prob", asked_by="return_log_probs"
        ),
        OutputTensor(
            name="output_log_probs",
            dtype=TensorType.FP32,
            dims=(-1, -1),
            value="log_probs",
            asked_by="return_log_probs",
        ),
        _array("top_token_ids", TensorType.INT32, 3, "num_log_probs"),
        _array("top_log_probs", TensorType.FP32, 3, "num_log_probs"),
        _array("prompt_log_probs", TensorType.FP32, 1, "return_prompt_log_probs"),
        _array("prompt_top_token_ids", TensorType.INT32, 2, "return_prompt_log_probs"),
        _array("prompt_top_log_probs", TensorType.FP32, 2, "return_prompt_log_probs"),
        _array("context_logits", TensorType.FP32, 2, "return_context_logits"),
        _array("generation_logits", TensorType.FP32, 3, "return_generation_logits"),
        _array("hidden_states", TensorType.FP32, 3, "additional_outputs"),
        _array("context_hidden_states", TensorType.FP32, 2, "gather_context"),
        OutputTensor(
            name="num_input_tokens",
            dtype=TensorType.INT32,
            dims=(1,),
            value="num_input_tokens",
            asked_by="return_num_input_tokens",
        ),
        OutputTensor(
            name="num_output_tokens",
            dtype=TensorType.INT32,
            dims=(1,),
            value="num_output_tokens",
            asked_by="return_num_output_tokens",
        ),
        _metric("arrival_time_ns", TensorType.INT64),
        _metric("first_scheduled_time_ns", TensorType.INT64),
        _metric("first_token_time_ns", TensorType.INT64),
        _metric("last_token_time_ns", TensorType.INT64),
        _metric("kv_cache_alloc_total_blocks", TensorType.INT32),
        _metric("kv_cache_alloc_new_blocks", TensorType.INT32),
        _metric("kv_cache_reused_blocks", TensorType.INT32),
        _metric("acceptance_rate", TensorType.FP32),
        _metric("total_accepted_draft_tokens", TensorType.INT32),
        _metric("total_draft_tokens", TensorType.INT32),
    ),
)

DIALECTS = {dialect.name: dialect for dialect in (LLM,)}
