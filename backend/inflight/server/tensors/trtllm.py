"""The dialects of NVIDIA's tensorrtllm_backend: `tensorrt_llm` takes token ids, `ensemble` and `tensorrt_llm_bls` text.

All have a batch dimension: the prompts of a request are served side by side. Where its decoders mean something else
than ours by a request that is silent (greedy unless top_k or top_p is given; every beam is answered), defaults say so.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.server.tensors.dialect import ANY_ONE, Default, Dialect, Gathering, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.entries import (
    BATCH_INDEX,
    CONTEXT_PHASE_OUTPUT,
    CONTEXT_PHASE_PARAMS,
    DRAFTS,
    EMBEDDING_BIAS,
    GUIDE_NOT_ENFORCED,
    GUIDE_OPTIONS,
    GUIDED_DECODING,
    LEGACY,
    LOG_PROBS,
    LOGITS,
    LORA_TENSORS,
    NO_ENCODER,
    NO_MEDIA,
    NUM_TOKENS,
    PENALTIES,
    PERF_METRICS,
    PROMPT_TABLE,
    PROMPT_TABLE_EXTRA_IDS,
    RETENTION,
    SEED,
    SEQUENCE_INDEX,
    output,
    refused,
    row,
    scalar,
)
from inflight.server.tensors.tensor_values import (
    Array,
    ReadLimits,
    read_above_zero,
    read_numbers,
    read_prompt,
    read_prompt_ids,
    read_scalar,
    read_texts,
    read_token_ids,
    read_word_ids,
    read_words,
)

NO_DRAFT_LOGITS = "a draft of this engine is accepted if it is what the model samples; draft_logits are a client's"

DEFAULTS = (
    Default(field="num_return_sequences", like="beam_width"),
    Default(field="top_k", value=1, unless=("top_p",)),
    Default(field="top_k", value=0),
    Default(field="top_p", value=1.0),
    Default(field="temperature", value=1.0),
    Default(field="min_p", value=0.0),
    Default(field="typical_p", value=1.0),
    Default(field="repetition_penalty", value=1.0),
    Default(field="no_repeat_ngram_size", value=0),
    Default(field="min_tokens", value=0),
)
"""Those of TensorRT-LLM's decoders, which read no generation_config.json. Neither 0 top_k nor 0 top_p is a limit, and
without a limit they are greedy, whatever the temperature."""

REPEATED = ("log_probs", "context_logits")
"""Its executor puts both into each response; clients read them from the last one. Those of a long prompt are too large
to be sent with every token."""

SWITCHES = (
    scalar("return_log_probs", TensorType.BOOL),
    scalar("return_context_logits", TensorType.BOOL),
    scalar("return_generation_logits", TensorType.BOOL),
    scalar("return_perf_metrics", TensorType.BOOL),
    scalar("return_kv_cache_reuse_stats", TensorType.BOOL, "return_perf_metrics"),
    scalar("return_num_input_tokens", TensorType.BOOL),
    scalar("return_num_output_tokens", TensorType.BOOL),
    scalar("exclude_input_in_output", TensorType.BOOL),
)


def _read_as_number(name: str, array: Array, limits: ReadLimits) -> int:
    return int(bool(read_scalar(name, array, limits)))


OUTPUTS = (
    BATCH_INDEX,
    replace(SEQUENCE_INDEX, asked_by="has_several_sequences"),
    *LOG_PROBS,
    *LOGITS,
    *NUM_TOKENS,
    GUIDE_NOT_ENFORCED,
    *PERF_METRICS,
)
"""Those that all three models have."""


def _words(name: str, field: str) -> InputTensor:
    return InputTensor(name=name, dtype=TensorType.INT32, dims=(2, -1), field=field, read=read_word_ids)


TENSORRT_LLM = Dialect(
    name="tensorrt_llm",
    batched=True,
    gathering=Gathering.BEAMS,
    repeats=REPEATED,
    stops_unknown=True,
    required=(("input_ids",), ("request_output_len",)),
    defaults=(*DEFAULTS, Default(field="end_id", value=-1)),
    inputs=(
        row("input_ids", TensorType.INT32, read_token_ids),
        scalar("input_lengths", TensorType.INT32, "input_length"),
        scalar("request_output_len", TensorType.INT32, "max_tokens"),
        scalar("num_return_sequences", TensorType.INT32),
        scalar("beam_width", TensorType.INT32),
        scalar("end_id", TensorType.INT32),
        scalar("pad_id", TensorType.INT32),
        _words("stop_words_list", "stop_word_ids"),
        _words("bad_words_list", "bad_word_ids"),
        EMBEDDING_BIAS,
        scalar("temperature", TensorType.FP32),
        scalar("runtime_top_k", TensorType.INT32, "top_k", read_above_zero),
        scalar("runtime_top_p", TensorType.FP32, "top_p", read_above_zero),
        scalar("runtime_top_p_min", TensorType.FP32, "top_p_min"),
        scalar("runtime_top_p_decay", TensorType.FP32, "top_p_decay"),
        scalar("runtime_top_p_reset_ids", TensorType.INT32, "top_p_reset_ids"),
        scalar("len_penalty", TensorType.FP32, "length_penalty"),
        scalar("early_stopping", TensorType.BOOL, read=_read_as_number),
        *PENALTIES,
        scalar("min_tokens", TensorType.INT32),
        scalar("beam_search_diversity_rate", TensorType.FP32),
        SEED,
        *LEGACY,
        *SWITCHES,
        scalar("stop", TensorType.BOOL),
        scalar("streaming", TensorType.BOOL, "stream"),
        *DRAFTS,
        *PROMPT_TABLE,
        PROMPT_TABLE_EXTRA_IDS,
        *LORA_TENSORS,
        *GUIDED_DECODING,
        *GUIDE_OPTIONS,
        *RETENTION,
        refused("encoder_input_features", TensorType.FP16, 2, NO_ENCODER),
        refused("encoder_output_lengths", TensorType.INT32, 1, NO_ENCODER),
        # preprocessing sends one padding token for every prompt.
        refused("decoder_input_ids", TensorType.INT32, 1, NO_ENCODER, ANY_ONE),
        refused("decoder_input_lengths", TensorType.INT32, 1, NO_ENCODER, ANY_ONE),
        refused("cross_attention_mask", TensorType.BOOL, 2, NO_ENCODER),
        refused("skip_cross_attn_blocks", TensorType.BOOL, 1, NO_ENCODER, False),
        refused("mrope_rotary_cos_sin", TensorType.FP32, 1, NO_MEDIA),
        refused("mrope_position_deltas", TensorType.INT64, 1, NO_MEDIA),
        CONTEXT_PHASE_PARAMS,
    ),
    outputs=(
        output("output_ids", TensorType.INT32, 2, "token_ids"),
        output("sequence_length", TensorType.INT32, 1, "sequence_length"),
        *OUTPUTS,
        CONTEXT_PHASE_OUTPUT,
    ),
)

_TEXT_INPUTS = (
    InputTensor(name="text_input", dtype=TensorType.STRING, dims=(1,), field="text", read=read_prompt),
    refused("decoder_text_input", TensorType.STRING, 1, NO_ENCODER, b""),
    scalar("max_tokens", TensorType.INT32),
    row("bad_words", TensorType.STRING, read_words),
    row("stop_words", TensorType.STRING, read_words),
    scalar("end_id", TensorType.INT32),
    scalar("pad_id", TensorType.INT32),
    scalar("top_k", TensorType.INT32, read=read_above_zero),
    scalar("top_p", TensorType.FP32, read=read_above_zero),
    scalar("temperature", TensorType.FP32),
    scalar("length_penalty", TensorType.FP32),
    *PENALTIES,
    scalar("min_tokens", TensorType.INT32),
    SEED,
    *LEGACY,
    scalar("num_return_sequences", TensorType.INT32),
    scalar("beam_width", TensorType.INT32),
    *SWITCHES,
    scalar("stream", TensorType.BOOL),
    *PROMPT_TABLE,
    InputTensor(
        name="prompt_table_extra_id",
        dtype=TensorType.UINT64,
        dims=(1,),
        field="prompt_table_extra_ids",
        read=read_prompt_ids,
    ),
    row("embedding_bias_words", TensorType.STRING, read_texts),
    row("embedding_bias_weights", TensorType.FP32, read_numbers),
    *LORA_TENSORS,
    *GUIDED_DECODING,
    *GUIDE_OPTIONS,
)
_TEXT_OUTPUTS = (
    # Its postprocessing makes one text a row, without a dimension for the batch.
    OutputTensor(name="text_output", dtype=TensorType.STRING, dims=(-1,), value="text", wire_rank=1),
    *OUTPUTS,
)

ENSEMBLE = Dialect(
    name="ensemble",
    batched=True,
    gathering=Gathering.BEAMS,
    repeats=REPEATED,
    required=(("text_input",), ("max_tokens",)),
    defaults=DEFAULTS,
    inputs=_TEXT_INPUTS,
    outputs=_TEXT_OUTPUTS,
)

TENSORRT_LLM_BLS = Dialect(
    name="tensorrt_llm_bls",
    batched=True,
    gathering=Gathering.BEAMS,
    repeats=REPEATED,
    required=ENSEMBLE.required,
    defaults=DEFAULTS,
    inputs=(
        *_TEXT_INPUTS,
        refused("image_input", TensorType.FP16, 4, NO_MEDIA),
        refused("image_bytes_input", TensorType.UINT8, 4, NO_MEDIA),
        refused("image_url_input", TensorType.STRING, 1, NO_MEDIA, b""),
        refused("video_bytes_input", TensorType.UINT8, 4, NO_MEDIA),
        scalar("num_draft_tokens", TensorType.INT32, "max_draft_len"),
        refused("use_draft_logits", TensorType.BOOL, 1, NO_DRAFT_LOGITS, False),
    ),
    outputs=_TEXT_OUTPUTS,
)
