"""The dialect of TensorRT-LLM's LLM API behind tritonserver: text, and a tensor for each sampling parameter.

Its model is called tensorrt_llm, as that of the C++ backend is. No batch dimension. Numbers are sent as text, whatever
its configuration says, and what is not known yet as "None". A request that sets none of temperature, top_k and top_p is
greedy, whatever generation_config.json says (`SamplingParams` of TensorRT-LLM).
"""

from __future__ import annotations

from dataclasses import replace

from inflight.server.tensors.dialect import Default, Dialect, OutputTensor, TensorType
from inflight.server.tensors.entries import NO_MEDIA, output, refused, row, scalar, single
from inflight.server.tensors.tensor_values import (
    Array,
    ReadLimits,
    Value,
    read_prompt,
    read_scalar,
    read_seed,
    read_words,
)

BY_NAME = "name an adapter of lora_dir with lora_name"
ONLY_THE_LIKELIEST = 1e-9
"""A top_p that no token but the likeliest is needed for."""


def _read_top_p(name: str, array: Array, limits: ReadLimits) -> Value:
    """As read_scalar; 0 means the likeliest token."""
    return read_scalar(name, array, limits) or ONLY_THE_LIKELIEST


def _metric(name: str, dtype: TensorType, value: str = "") -> OutputTensor:
    return replace(single(name, dtype, "return_perf_metrics", f"perf_metrics.{value or name}"), as_text=True)


LLMAPI = Dialect(
    name="llmapi",
    required=(("text_input",),),
    unfinished="None",
    repeats=("text",),
    defaults=(
        Default(field="max_tokens", value=32),
        Default(field="top_k", value=1, unless=("temperature", "top_p")),
        Default(field="top_k", value=0),
        Default(field="top_p", value=1.0),
        Default(field="temperature", value=1.0),
        Default(field="min_p", value=0.0),
        Default(field="typical_p", value=1.0),
        Default(field="repetition_penalty", value=1.0),
        Default(field="no_repeat_ngram_size", value=0),
        Default(field="min_tokens", value=0),
    ),
    stops_unknown=True,
    stop_error="the request was stopped",
    inputs=(
        row("text_input", TensorType.STRING, read_prompt, "text"),
        refused("image_url", TensorType.STRING, 1, NO_MEDIA, b""),
        scalar("streaming", TensorType.BOOL, "stream"),
        refused("sampling_param_best_of", TensorType.INT32, 1, "ask for several answers and choose among them", 1),
        scalar("sampling_param_temperature", TensorType.FP32, "temperature"),
        scalar("sampling_param_top_k", TensorType.INT32, "top_k"),
        scalar("sampling_param_top_p", TensorType.FP32, "top_p", _read_top_p),
        scalar("sampling_param_frequency_penalty", TensorType.FP32, "frequency_penalty"),
        scalar("sampling_param_presence_penalty", TensorType.FP32, "presence_penalty"),
        scalar("sampling_param_max_tokens", TensorType.INT32, "max_tokens"),
        row("sampling_param_stop", TensorType.STRING, read_words, "stop_words"),
        scalar("sampling_param_seed", TensorType.UINT64, "seed", read_seed),
        scalar("sampling_param_exclude_input_from_output", TensorType.BOOL, "exclude_input_in_output"),
        scalar("sampling_param_return_perf_metrics", TensorType.BOOL, "return_perf_metrics"),
        scalar("sampling_param_logits_post_processor_name", TensorType.STRING, "logits_post_processor_name"),
        scalar("return_finish_reason", TensorType.BOOL),
        scalar("return_stop_reason", TensorType.BOOL),
        scalar("return_cumulative_logprob", TensorType.BOOL, "return_log_probs"),
        scalar("stop", TensorType.BOOL),
        scalar("lora_name", TensorType.STRING),
        refused("lora_id", TensorType.UINT64, 1, BY_NAME),
        refused("lora_path", TensorType.STRING, 1, BY_NAME, b""),
        refused("lora_ckpt_source", TensorType.STRING, 1, BY_NAME, b"", b"hf"),
    ),
    outputs=(
        output("text_output", TensorType.STRING, 1, "text"),
        output("finish_reason", TensorType.STRING, 1, "finish_reason", "return_finish_reason"),
        output("stop_reason", TensorType.STRING, 1, "stop_reason", "return_stop_reason"),
        replace(output("cumulative_logprob", TensorType.FP32, 1, "cum_log_prob", "return_log_probs"), as_text=True),
        _metric("kv_cache_reused_block", TensorType.INT32, "kv_cache_reused_blocks"),
        _metric("kv_cache_missed_block", TensorType.INT32, "kv_cache_missed_blocks"),
        _metric("kv_cache_alloc_new_blocks", TensorType.INT32),
        _metric("kv_cache_alloc_total_blocks", TensorType.INT32),
        _metric("kv_cache_hit_rate", TensorType.FP32),
        _metric("arrival_time_ns", TensorType.INT64),
        _metric("first_scheduled_time_ns", TensorType.INT64),
        _metric("first_token_time_ns", TensorType.INT64),
        _metric("last_token_time_ns", TensorType.INT64),
        _metric("acceptance_rate", TensorType.FP32),
        _metric("total_accepted_draft_tokens", TensorType.INT32),
        _metric("total_draft_tokens", TensorType.INT32),
    ),
)
