"""Everything that a request can ask of the default model: a request of each kind, in Python and as tensors.

Tests serve each kind in all ways (WAYS) and compare it with what it gets alone; the table of FEATURES.md is made from
the same list, so that it says what was proved and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from guides import guide
from safetensors import deserialize

from inflight.guided_decoding import GuideType
from inflight.kv_cache_retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.lora import LoRARequest
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.prompt_tuning import Array, EmbeddingTable, PromptTuningConfig
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import (
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
)
from inflight.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "llm" / "1" / "checkpoint"
ADAPTERS = CHECKPOINT.with_name("adapters")
TOKENIZER = Tokenizer.load(CHECKPOINT)
VOCAB_SIZE = 2048
NUM_TOKENS = 14
PROMPT = [1, *TOKENIZER.encode_plain("Once upon a time there was a little dog who liked to play. One day")]

END_EARLY = [379]
"""A token that the greedy continuation of PROMPT holds before its ninth."""

DRAFTS = [20, 205, 205, 379, 594, 300, 301]
"""How the greedy continuation of PROMPT begins, and two tokens that it does not have."""
DRAFT_LOGITS = np.cos(np.arange(len(DRAFTS) * 2048, dtype=np.float32)).reshape(len(DRAFTS), 2048)
"""What they may have been sampled from."""
ENGINE: dict[str, Any] = {
    "logits_post_processors": "favour=logit_functions:favour",
    "speculative_model_dir": str(CHECKPOINT),
    "speculative_max_draft_len": 0,
}
"""What the engine's configuration needs for some kinds; ci/helpers must be on the ranks' path."""

WAYS = ("Python", "tensors", "two ranks", "chunked prefill", "preemption", "prefix reuse")
"""In which each kind is served, by `test_requests_of_all_kinds.py` of ci/unit/executor and of ci/L0_llm."""

HIDDEN = AdditionalModelOutput(name="hidden_states", gather_context=True)
NOT_REUSED = {"prefix reuse": "its prompt is always computed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind:
    """One kind of request. Greedy, of NUM_TOKENS tokens without an end token, where it does not say otherwise."""

    feature: str
    """As that table calls it."""
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    fields: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of GenerationExecutor.generate_async."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """The same as inputs of the model `llm`."""
    kernels: tuple[str, ...] = ()
    """Functions of inflight_kernels that it runs on a GPU and a greedy request does not."""
    equals_greedy: bool = False
    """Whether its tokens are those of the greedy request of the same prompt, on purpose."""
    exceptions: dict[str, str] = field(default_factory=dict)
    """Ways in which it is not served -> why."""

    @property
    def num_sequences(self) -> int:
        return int(self.fields.get("num_return_sequences", 1))

    def python(self) -> dict[str, Any]:
        """All keyword arguments of GenerationExecutor.generate_async but the prompt."""
        usual = {"max_tokens": NUM_TOKENS, "sampling_config": SamplingConfig(), "end_ids": []}
        return {**usual, **self.fields}

    def inputs(self) -> dict[str, Any]:
        """All tensors of the request."""
        prompt = {} if "prompt_embeds" in self.tensors else {"input_ids": np.array(self.prompt, np.int32)}
        usual = {**prompt, "max_tokens": NUM_TOKENS, "temperature": 0.0, "end_id": -1}
        return {**usual, "exclude_input_in_output": True, **self.tensors}


def _sampling(feature: str, **options: Any) -> RequestKind:
    """One whose tensors have the names and values of SamplingConfig's fields."""
    return RequestKind(
        feature=feature,
        fields={"sampling_config": SamplingConfig(**options)},
        tensors={name: np.array([value], np.uint64) if name == "seed" else value for name, value in options.items()},
    )


def _rows(text: str, dtype: str) -> Array:
    """Embeddings of a text's tokens."""
    weight = dict(deserialize((CHECKPOINT / "model.safetensors").read_bytes()))["model.embed_tokens.weight"]
    table = EmbeddingTable(dtype="bfloat16", shape=tuple(weight["shape"]), data=bytes(weight["data"]))
    return table.rows(np.array(TOKENIZER.encode_plain(text))).astype(dtype)


WORDS = "[a-z ]{60,80}"
TALE = "The (cat|dog|bird) went to the big park with [a-z]{2,9}, because [a-z ]{30,40}"
TALE_TOKENS = 24
TAGGED = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "dispatch",
            "rules": [[" rainy day", {"type": "regex", "pattern": " in (Rome|Oslo) with [0-9] dogs,"}]],
        },
    }
)
"""Of free text that, once it has this beginning, goes on like that. The greedy continuation of PROMPT has it."""
_TABLE, _EMBEDS = _rows("A big bear", "f2"), _rows("The frog was very hungry. One day, he met a bird", "f4")
_OWN_TOKENS = list(range(VOCAB_SIZE, VOCAB_SIZE + len(_TABLE)))
_BIAS = np.sin(np.arange(VOCAB_SIZE, dtype="<f4"))

KINDS = (
    RequestKind(feature="greedy", equals_greedy=True),
    RequestKind(
        feature="tokens behind the prompt (query_token_ids)",
        prompt=PROMPT[:-2],
        fields={"query_token_ids": PROMPT[-2:]},
        tensors={"input_ids": np.array(PROMPT, np.int32)},
        equals_greedy=True,
        exceptions={"tensors": "they are the last of `input_ids`"},
    ),
    _sampling("temperature, top_k, top_p, min_p, seed", temperature=1.1, top_k=40, top_p=0.9, min_p=0.02, seed=2**63),
    _sampling("typical_p", typical_p=0.3, temperature=1.4, top_p=0.95, seed=12),
    _sampling("top_p that decays", temperature=1.2, top_p=0.9, top_p_decay=0.8, top_p_min=0.2, seed=5),
    _sampling(
        "penalties", repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, temperature=0.9, seed=8
    ),
    _sampling("no_repeat_ngram_size", no_repeat_ngram_size=1),
    RequestKind(
        feature="min_tokens",
        fields={"sampling_config": SamplingConfig(min_tokens=9), "end_ids": END_EARLY},
        tensors={"min_tokens": 9, "end_id": END_EARLY[0]},
    ),
    RequestKind(
        feature="bad words",
        # The server forbids a word at the start of a text and behind a space.
        fields={"bad_words": [TOKENIZER.encode_plain(word) for word in ("the", "was a", " the", " was a")]},
        tensors={"bad_words": ["the", "was a"]},
    ),
    RequestKind(
        feature="logit bias by token",
        fields={"sampling_config": SamplingConfig(logit_bias={300: 9.0, 301: -9.0, 302: 8.5})},
        tensors={
            "logit_bias_ids": [300, 301, 302],
            "logit_bias_values": np.array([9.0, -9.0, 8.5], np.float32),
        },
    ),
    RequestKind(
        feature="bias of the whole vocabulary",
        fields={"sampling_config": SamplingConfig(embedding_bias=_BIAS.tobytes(), temperature=0.8, seed=4)},
        tensors={"embedding_bias": _BIAS, "temperature": 0.8, "seed": np.array([4], np.uint64)},
    ),
    RequestKind(
        feature="log probabilities, of the likeliest too",
        fields={"output_config": OutputConfig(return_log_probs=True, num_log_probs=5)},
        tensors={"return_log_probs": True, "num_log_probs": 5},
    ),
    RequestKind(
        feature="log probabilities of the prompt",
        fields={"output_config": OutputConfig(return_prompt_log_probs=True, num_log_probs=3)},
        tensors={"return_prompt_log_probs": True, "num_log_probs": 3},
        exceptions=NOT_REUSED,
    ),
    RequestKind(
        feature="context and generation logits",
        fields={"output_config": OutputConfig(return_context_logits=True, return_generation_logits=True)},
        tensors={"return_context_logits": True, "return_generation_logits": True},
        exceptions=NOT_REUSED,
    ),
    RequestKind(
        feature="hidden states",
        fields={"output_config": OutputConfig(additional_model_outputs=[HIDDEN])},
        tensors={"additional_outputs": ["hidden_states"], "gather_context": True},
        exceptions=NOT_REUSED,
    ),
    RequestKind(
        feature="prompt embedding table",
        prompt=[*PROMPT[:6], *_OWN_TOKENS, *PROMPT[6:], _OWN_TOKENS[-1]],
        fields={"prompt_tuning_config": PromptTuningConfig(embedding_table=EmbeddingTable.of(_TABLE))},
        tensors={"prompt_embedding_table": _TABLE, "prompt_vocab_size": len(_TABLE)},
    ),
    RequestKind(
        feature="prompt embeddings",
        prompt=list(range(VOCAB_SIZE, VOCAB_SIZE + len(_EMBEDS))),
        fields={
            "prompt_tuning_config": PromptTuningConfig(embedding_table=EmbeddingTable.of(_EMBEDS)),
            "sampling_config": SamplingConfig(temperature=0.9, seed=13, repetition_penalty=1.2, no_repeat_ngram_size=2),
        },
        tensors={
            "prompt_embeds": _EMBEDS,
            "temperature": 0.9,
            "seed": np.array([13], np.uint64),
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
        },
    ),
    RequestKind(
        feature="several sequences",
        fields={"num_return_sequences": 3, "sampling_config": SamplingConfig(temperature=1.0, seed=3)},
        tensors={"num_return_sequences": 3, "temperature": 1.0, "seed": np.array([3], np.uint64)},
        kernels=("copy_blocks",),
    ),
    RequestKind(
        feature="KV cache retention",
        fields={
            "kv_cache_retention_config": KvCacheRetentionConfig(
                token_range_retention_configs=[TokenRangeRetentionConfig(token_start=0, priority=90, duration_ms=1)],
                decode_retention_priority=10,
            )
        },
        tensors={
            "retention_token_range_starts": np.array([0], np.int32),
            "retention_token_range_ends": np.array([-1], np.int32),
            "retention_token_range_priorities": np.array([90], np.int32),
            "retention_token_range_durations_ms": np.array([1], np.int32),
            "retention_decode_priority": 10,
        },
        equals_greedy=True,
    ),
    RequestKind(
        feature="beam search",
        fields={"num_return_sequences": 2, "sampling_config": SamplingConfig(beam_width=3, length_penalty=0.5)},
        tensors={"beam_width": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        kernels=("copy_blocks",),
    ),
    RequestKind(
        feature="beams of changing number, diverse",
        fields={
            "num_return_sequences": 2,
            "sampling_config": SamplingConfig(
                beam_width=3, beam_width_array=[1, 2, 3], beam_search_diversity_rate=0.25
            ),
        },
        tensors={
            "beam_width": 3,
            "num_return_sequences": 2,
            "beam_width_array": np.array([1, 2, 3], np.int32),
            "beam_search_diversity_rate": 0.25,
        },
        kernels=("copy_blocks",),
    ),
    RequestKind(
        feature="prompt lookup",
        fields={"ngram_config": NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=1)},
        tensors={"max_draft_len": 4, "max_matching_ngram_size": 1},
        equals_greedy=True,
    ),
    RequestKind(
        feature="lookahead decoding",
        fields={"lookahead_config": LookaheadDecodingConfig(max_window_size=3)},
        tensors={"lookahead_window_size": 3, "lookahead_ngram_size": 3, "lookahead_verification_set_size": 4},
        equals_greedy=True,
    ),
    RequestKind(
        feature="draft model",
        fields={"draft_target_config": DraftTargetDecodingConfig(max_draft_len=3)},
        tensors={"speculative_max_draft_len": 3},
        equals_greedy=True,
    ),
    RequestKind(
        feature="draft tokens",
        fields={"external_draft_tokens_config": ExternalDraftTokensConfig(tokens=DRAFTS)},
        tensors={"draft_input_ids": DRAFTS},
        equals_greedy=True,
    ),
    RequestKind(
        feature="draft tokens with logits",
        fields={
            "external_draft_tokens_config": ExternalDraftTokensConfig(tokens=DRAFTS, logits=DRAFT_LOGITS.tobytes()),
            "sampling_config": SamplingConfig(temperature=0.7, top_p=0.95, seed=4, repetition_penalty=1.1),
        },
        tensors={
            "draft_input_ids": DRAFTS,
            "draft_logits": DRAFT_LOGITS,
            "temperature": 0.7,
            "top_p": 0.95,
            "seed": np.array([4], np.uint64),
            "repetition_penalty": 1.1,
        },
    ),
    RequestKind(
        feature="draft tokens with a threshold",
        fields={"external_draft_tokens_config": ExternalDraftTokensConfig(tokens=DRAFTS, acceptance_threshold=1e-20)},
        tensors={"draft_input_ids": DRAFTS, "draft_acceptance_threshold": 1e-20},
    ),
    RequestKind(
        feature="logits post-processor",
        fields={"logits_post_processor_name": "favour"},
        tensors={"logits_post_processor_name": "favour"},
    ),
    RequestKind(
        feature="guided decoding",
        fields={
            "guided_decoding_params": guide(GuideType.REGEX, WORDS),
            "sampling_config": SamplingConfig(temperature=1.0, seed=6),
            "end_ids": [2],
        },
        tensors={
            "guided_decoding_guide_type": "regex",
            "guided_decoding_guide": WORDS,
            "temperature": 1.0,
            "seed": np.array([6], np.uint64),
            "end_id": 2,
        },
    ),
    RequestKind(
        feature="guided decoding of tags in free text",
        fields={
            "guided_decoding_params": guide(GuideType.STRUCTURAL_TAG, TAGGED),
            "end_ids": [2],
            "max_tokens": TALE_TOKENS,
        },
        tensors={
            "guided_decoding_guide_type": "structural_tag",
            "guided_decoding_guide": TAGGED,
            "end_id": 2,
            "max_tokens": TALE_TOKENS,
        },
    ),
    RequestKind(
        feature="guided decoding, forced text, prompt lookup and draft tokens",
        fields={
            "guided_decoding_params": guide(GuideType.REGEX, TALE),
            "sampling_config": SamplingConfig(temperature=1.0, seed=9),
            "ngram_config": NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=1),
            "external_draft_tokens_config": ExternalDraftTokensConfig(tokens=DRAFTS),
            "max_tokens": TALE_TOKENS,
            "end_ids": [2],
        },
        tensors={
            "guided_decoding_guide_type": "regex",
            "guided_decoding_guide": TALE,
            "temperature": 1.0,
            "seed": np.array([9], np.uint64),
            "max_draft_len": 4,
            "max_matching_ngram_size": 1,
            "draft_input_ids": DRAFTS,
            "max_tokens": TALE_TOKENS,
            "end_id": 2,
        },
    ),
    RequestKind(
        feature="LoRA adapter",
        fields={"lora_request": LoRARequest("pirate")},
        tensors={"lora_name": "pirate"},
        kernels=("lora_add",),
    ),
)
