"""The dialects that this backend speaks, as tables.

`llm` combines the tensor names of TensorRT-LLM's ensemble for text, those of its inner model for token ids, and what
users of vLLM expect besides (min_p, finish_reason). No batch dimension: config.pbtxt has max_batch_size 0. The
neighbours' own tables are in `trtllm`, `processing`, `llmapi`, `vllm` and `pooled`.
"""

from __future__ import annotations

from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.entries import (
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
    NUM_TOKENS,
    PENALTIES,
    PERF_METRICS,
    PROMPT_TABLE,
    PROMPT_TABLE_EXTRA_IDS,
    RETENTION,
    SEED,
    SEQUENCE_INDEX,
    embeddings,
    output,
    row,
    scalar,
    single,
)
from inflight.server.tensors.llmapi import LLMAPI
from inflight.server.tensors.pooled import EMBEDDING, RERANK
from inflight.server.tensors.processing import POSTPROCESSING, PREPROCESSING
from inflight.server.tensors.tensor_values import (
    read_images,
    read_numbers,
    read_prompt,
    read_resume_token,
    read_texts,
    read_token_ids,
    read_words,
)
from inflight.server.tensors.trtllm import ENSEMBLE, TENSORRT_LLM, TENSORRT_LLM_BLS
from inflight.server.tensors.vllm import VLLM_MODEL

HIDDEN_STATES = ("hidden_states",)


def _array(name: str, dtype: TensorType, rank: int, **by_name: object) -> OutputTensor:
    """Asked for by the first field of `by_name`; a request that names the output instead has all of these."""
    dims = (-1,) * rank
    return OutputTensor(name=name, dtype=dtype, dims=dims, value=name, asked_by=next(iter(by_name)), by_name=by_name)


LLM = Dialect(
    name="llm",
    required=(("text_input", "input_ids", "prompt_embeds"), ("max_tokens",)),
    inputs=(
        InputTensor(name="text_input", dtype=TensorType.STRING, dims=(1,), field="text", read=read_prompt),
        row("image", TensorType.STRING, read_images, "images"),
        row("input_ids", TensorType.INT32, read_token_ids),
        embeddings("prompt_embeds", TensorType.FP32),
        *PROMPT_TABLE,
        PROMPT_TABLE_EXTRA_IDS,
        scalar("max_tokens", TensorType.INT32),
        scalar("stream", TensorType.BOOL),
        scalar("temperature", TensorType.FP32),
        scalar("top_k", TensorType.INT32),
        scalar("top_p", TensorType.FP32),
        scalar("min_p", TensorType.FP32),
        scalar("typical_p", TensorType.FP32),
        SEED,
        *PENALTIES,
        scalar("min_tokens", TensorType.INT32),
        scalar("num_return_sequences", TensorType.INT32),
        scalar("beam_width", TensorType.INT32),
        scalar("length_penalty", TensorType.FP32),
        scalar("early_stopping", TensorType.INT32),
        row("beam_width_array", TensorType.INT32, read_numbers),
        scalar("beam_search_diversity_rate", TensorType.FP32),
        scalar("no_repeat_ngram_size", TensorType.INT32),
        scalar("top_p_decay", TensorType.FP32),
        scalar("top_p_min", TensorType.FP32),
        scalar("top_p_reset_ids", TensorType.INT32),
        row("logit_bias_ids", TensorType.INT32, read_numbers),
        row("logit_bias_values", TensorType.FP32, read_numbers),
        EMBEDDING_BIAS,
        row("embedding_bias_words", TensorType.STRING, read_texts),
        row("embedding_bias_weights", TensorType.FP32, read_numbers),
        row("stop_words", TensorType.STRING, read_words),
        row("bad_words", TensorType.STRING, read_words),
        scalar("end_id", TensorType.INT32),
        scalar("pad_id", TensorType.INT32),
        *GUIDED_DECODING,
        *GUIDE_OPTIONS,
        scalar("max_draft_len", TensorType.INT32),
        scalar("max_matching_ngram_size", TensorType.INT32),
        scalar("speculative_max_draft_len", TensorType.INT32),
        *DRAFTS,
        scalar("logits_post_processor_name", TensorType.STRING),
        scalar("lora_name", TensorType.STRING),
        *LORA_TENSORS,
        scalar("lora_order", TensorType.STRING),
        scalar("exclude_input_in_output", TensorType.BOOL),
        scalar("return_log_probs", TensorType.BOOL),
        scalar("num_log_probs", TensorType.INT32),
        scalar("return_prompt_log_probs", TensorType.BOOL),
        scalar("return_context_logits", TensorType.BOOL),
        scalar("return_generation_logits", TensorType.BOOL),
        row("additional_outputs", TensorType.STRING, read_words),
        scalar("gather_context", TensorType.BOOL),
        scalar("return_num_input_tokens", TensorType.BOOL),
        scalar("return_num_output_tokens", TensorType.BOOL),
        scalar("return_perf_metrics", TensorType.BOOL),
        scalar("return_resume_token", TensorType.BOOL),
        scalar("resume_token", TensorType.STRING, read=read_resume_token),
        CONTEXT_PHASE_PARAMS,
        *RETENTION,
        *LEGACY,
        scalar("stop", TensorType.BOOL),
    ),
    outputs=(
        output("text_output", TensorType.STRING, 1, "text"),
        output("output_ids", TensorType.INT32, 2, "token_ids"),
        output("sequence_length", TensorType.INT32, 1, "sequence_length"),
        output("finish_reason", TensorType.STRING, 1, "finish_reason"),
        SEQUENCE_INDEX,
        *LOG_PROBS,
        _array("top_token_ids", TensorType.INT32, 3, num_log_probs=1),
        _array("top_log_probs", TensorType.FP32, 3, num_log_probs=1),
        _array("prompt_log_probs", TensorType.FP32, 1, return_prompt_log_probs=True),
        _array("prompt_top_token_ids", TensorType.INT32, 2, return_prompt_log_probs=True, num_log_probs=1),
        _array("prompt_top_log_probs", TensorType.FP32, 2, return_prompt_log_probs=True, num_log_probs=1),
        *LOGITS,
        _array("hidden_states", TensorType.FP32, 3, additional_outputs=HIDDEN_STATES),
        _array("context_hidden_states", TensorType.FP32, 2, gather_context=True, additional_outputs=HIDDEN_STATES),
        *NUM_TOKENS,
        GUIDE_NOT_ENFORCED,
        single("resume_token", TensorType.STRING, "return_resume_token"),
        CONTEXT_PHASE_OUTPUT,
        *PERF_METRICS,
    ),
)

DIALECTS = {
    dialect.name: dialect
    for dialect in (
        LLM,
        TENSORRT_LLM,
        ENSEMBLE,
        TENSORRT_LLM_BLS,
        PREPROCESSING,
        POSTPROCESSING,
        LLMAPI,
        VLLM_MODEL,
        EMBEDDING,
        RERANK,
    )
}
"""By name. A model has the dialect that its parameter `dialect` names, or that has the model's own name."""
