"""What a running engine can serve: the bounds that every request is checked against, by its front and by every rank."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from inflight.context_phase import RequestType
from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingBackend
from inflight.output_config import MAX_LOG_PROBS, SCORES, Pooled
from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig
from inflight.replay import Replay
from inflight.request import Request
from inflight.sampling_config import MAX_BIAS, MAX_BIASED_TOKENS, SamplingConfig
from inflight.speculative_decoding import ExternalDraftTokensConfig

NOT_SPLIT = (
    "request_type context_only and generation_only need an engine that hands contexts over: set its key "
    "max_tokens_in_buffer, or leave request_type out"
)
MAX_DRAFT_LOGITS_BYTES = 48 * 2**20
"""Of one request: a message to the leader may have 64 MiB."""


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on requests that a running engine can serve. The leader announces them to its fronts; the server side and
    every rank check requests against them."""

    vocab_size: int
    max_seq_len: int
    """Prompt plus new tokens of one sequence."""
    max_input_len: int
    """Prompt tokens of one request."""
    kv_cache_tokens: int
    """Tokens that the whole KV pool holds."""
    max_batch_size: int = 1
    """Sequences that run at once, and so the most that one request may have."""
    max_beam_width: int = 0
    """Beams of one request; 0 = max_batch_size."""
    pooled: Pooled = ""
    """What the engine gives of a prompt in the place of tokens, which it does not generate then: vectors of
    `hidden_size` features, or scores, for each of `num_labels` one, beside them. "" = it generates."""
    num_labels: int = 0
    """Scores of a prompt."""
    is_causal: bool = False
    """Whether each token of such a prompt sees only those before it: so prompts are computed in pieces, and what they
    begin with is reused."""
    has_token_types: bool = False
    """Whether tokens of the second text of a pair are embedded otherwise than those of the first."""
    hidden_size: int = 0
    """Features of a hidden state."""
    embedding_size: int = 0
    """Features of a row of a PromptTuningConfig; 0 = the network takes none."""
    max_prompt_embedding_bytes: int = 2**25
    """Of the table of a PromptTuningConfig: it is broadcast with its request."""
    model_outputs: list[str] = []
    """Names that `AdditionalModelOutput` may have."""
    logits_post_processors: list[str] = []
    """Names that `Request.logits_post_processor_name` may have."""
    max_tensor_bytes: int = 2**28
    """Of all tensors that one request asks for: they are held on the host until it takes them."""
    num_adapter_slots: int = 0
    """Low-rank adapters that run at once; 0 = none is served."""
    max_context_tokens: int = 0
    """Prompt tokens of a request that is split between this engine and another one; 0 = none is."""
    has_draft_model: bool = False
    """Requests may have drafts of it."""
    guided_decoding_backend: GuidedDecodingBackend = GuidedDecodingBackend.LLGUIDANCE
    """The library that follows guides."""
    max_end_ids: int = 128
    """Maximum number of end tokens: each beam has a candidate more for each of them, and the loop sorts those of all
    beams. Checkpoints have a few."""
    max_words: int = 2048
    """Maximum number of stop words, and of bad words, of one request: 1024, each with and without a leading space."""
    max_words_tokens: int = 32768
    """Maximum number of words times the length of the longest: every step compares each word with its row's end."""

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest with the reason if `request` can never be served."""
        self.validate_queueing(request)
        self._validate_adapter(request)
        if request.lora_order:
            return
        tokens = request.input_token_ids
        if not tokens:
            raise InvalidRequest("the prompt is empty: give at least one token")
        if len(tokens) > self.max_input_len:
            raise InvalidRequest(f"the prompt has {len(tokens)} tokens, more than max_input_len {self.max_input_len}")
        if self.pooled:
            self._validate_pooled(request)
            return
        if request.second_text_start:
            raise InvalidRequest("second_text_start is for encoders, and this engine generates tokens: leave it out")
        if not 1 <= request.max_tokens < 2**31 - 1:
            raise InvalidRequest(f"max_tokens must be between 1 and {2**31 - 2}, got {request.max_tokens}")
        if len(tokens) >= self.max_seq_len:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens and leaves no room for a new one within max_seq_len "
                f"{self.max_seq_len}"
            )
        if self.longest(request) > self.kv_cache_tokens:
            raise InvalidRequest(
                f"the request needs room for {self.longest(request)} tokens, more than the whole KV cache holds "
                f"({self.kv_cache_tokens}): ask for fewer tokens"
            )
        if request.prompt_tuning_config is not None:
            self._validate_prompt_tuning(request, request.prompt_tuning_config)
        self._validate_token_ids(request)
        self._validate_request_type(request)
        request.sampling_config.validate()
        if request.replay is not None:
            self.validate_replay(request, request.replay)
        if request.sampling_config.beam_width > 1:
            self._validate_beams(request)
        self._validate_biases(request.sampling_config)
        self._validate_outputs(request)
        if request.guided_decoding_params is not None:
            request.guided_decoding_params.validate()
            if not request.end_ids:
                raise InvalidRequest("guided decoding needs an end token: set end_id to a token, not to -1")
        if request.kv_cache_retention_config is not None:
            request.kv_cache_retention_config.validate()
        self._validate_drafts(request)
        name = request.logits_post_processor_name
        if name and name not in self.logits_post_processors:
            known = ", ".join(self.logits_post_processors) or "none"
            raise InvalidRequest(
                f"logits_post_processor_name is {name[:80]!r}, which this engine does not have; it has: {known}"
            )

    def _validate_pooled(self, request: Request) -> None:
        """Of an engine that generates nothing: what concerns generated tokens is refused."""
        config = request.output_config
        refused = {
            "max_tokens": request.max_tokens != 0,
            "beam_width": request.sampling_config.beam_width > 1,
            "num_return_sequences": request.num_return_sequences > 1,
            "stop_words": bool(request.stop_words),
            "bad_words": bool(request.bad_words),
            "guided_decoding_guide_type": request.guided_decoding_params is not None,
            "logits_post_processor_name": bool(request.logits_post_processor_name),
            "draft_input_ids": request.external_draft_tokens_config is not None,
            "request_type": request.request_type is not RequestType.CONTEXT_AND_GENERATION,
            "prompt_embedding_table": request.prompt_tuning_config is not None,
            "return_log_probs": config.return_log_probs,
            "num_log_probs": config.num_log_probs != 0,
            "return_prompt_log_probs": config.return_prompt_log_probs,
            "return_context_logits": config.return_context_logits,
            "return_generation_logits": config.return_generation_logits,
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise InvalidRequest(
                    f"{name} is about generated tokens, and this engine gives {self.pooled} of prompts and no tokens: "
                    + ("set it to 0" if name == "max_tokens" else "leave it out")
                )
        if not config.additional_model_outputs:
            offered = ", ".join(self.model_outputs)
            raise InvalidRequest(
                f"this engine gives {self.pooled} of prompts and no tokens, and the request asks for none: name one of "
                f"{offered} in additional_outputs, or send it to /v1/embeddings or /rerank"
            )
        for output in config.additional_model_outputs:
            if output.name != SCORES and not output.is_of_prompt:
                raise InvalidRequest(
                    f"additional_outputs asks for {output.name[:80]!r} of generated tokens, and there are none: give a "
                    "pooling, or gather_context"
                )
        if not 0 <= request.second_text_start < len(request.input_token_ids):
            raise InvalidRequest(
                f"second_text_start must be a place in the prompt of {len(request.input_token_ids)} tokens, got "
                f"{request.second_text_start}"
            )
        self._validate_token_ids(request)
        self._validate_outputs(request)

    def validate_queueing(self, request: Request) -> None:
        """The part of `validate` that queues and the broadcast depend on: the leader needs it before the ranks validate
        the rest."""
        if not 0 <= request.request_id < 2**64:
            raise InvalidRequest(f"request_id must be between 0 and {2**64 - 1}, got {request.request_id}")
        if not 0.0 <= request.priority <= 1.0:
            raise InvalidRequest(f"priority must be between 0 and 1, got {request.priority}")
        if request.allotted_time_ms < 0:
            raise InvalidRequest(f"allotted_time_ms must not be negative, got {request.allotted_time_ms}")
        num_sequences = request.num_return_sequences
        if not 1 <= num_sequences <= self.max_batch_size:
            raise InvalidRequest(
                f"num_return_sequences must be between 1 and max_batch_size {self.max_batch_size}, got {num_sequences}"
            )
        name, most, width = "max_batch_size", self.max_batch_size, request.sampling_config.beam_width
        if 0 < self.max_beam_width < most:
            name, most = "max_beam_width", self.max_beam_width
        if width > most:
            raise InvalidRequest(f"beam_width must be between 1 and {name} {most}, got {width}")
        num_bytes = len(request.sampling_config.embedding_bias)
        if num_bytes not in (0, 4 * self.vocab_size):
            raise InvalidRequest(
                f"embedding_bias must hold one float32 for each of the {self.vocab_size} tokens of the vocabulary, "
                f"got {num_bytes} bytes"
            )

    def _validate_request_type(self, request: Request) -> None:
        kind, params = request.request_type, request.context_phase_params
        if kind is RequestType.CONTEXT_AND_GENERATION and params is None:
            return
        if not self.max_context_tokens:
            raise InvalidRequest(NOT_SPLIT)
        if len(request.input_token_ids) > self.max_context_tokens:
            raise InvalidRequest(
                f"the prompt has {len(request.input_token_ids)} tokens, more than max_tokens_in_buffer allows to hand "
                f"over ({self.max_context_tokens}): leave request_type out"
            )
        if kind is RequestType.CONTEXT_ONLY and request.sampling_config.beam_width > 1:
            raise InvalidRequest(
                "request_type context_only is not supported together with beam_width above 1: a beam search computes "
                "its prompt where it generates"
            )
        if (kind is RequestType.GENERATION_ONLY) != (params is not None):
            raise InvalidRequest(
                "request_type generation_only and context_phase_params belong together: give both or neither"
            )

    def longest(self, request: Request) -> int:
        """Most tokens that `request` can hold in the KV cache: its last token is sampled but never computed."""
        return min(len(request.input_token_ids) + request.max_tokens, self.max_seq_len) - 1

    def _validate_adapter(self, request: Request) -> None:
        by_name, by_number = request.lora_request, request.lora_config
        if by_name is None and by_number is None:
            if request.lora_order:
                raise InvalidRequest(f"lora_order {request.lora_order} needs an adapter: lora_name or lora_task_id")
            return
        if by_name is not None and by_number is not None:
            raise InvalidRequest("lora_name and lora_task_id are two adapters: give one of them")
        if not self.num_adapter_slots:
            raise InvalidRequest(
                "this engine serves no LoRA adapters: they need max_loras above 0 and a network that its own layers "
                "compute (model_impl native)"
            )
        for adapter in (by_name, by_number):
            if adapter is not None:
                adapter.validate()

    def _validate_beams(self, request: Request) -> None:
        """What has no meaning for a beam, or is not done, is refused."""
        sampling, width = request.sampling_config, request.sampling_config.beam_width
        if request.num_return_sequences > width:
            raise InvalidRequest(
                f"num_return_sequences ({request.num_return_sequences}) must not be above beam_width ({width})"
            )
        widths, num_tokens = sampling.beam_width_array, self.longest(request) + 1 - len(request.input_token_ids)
        if widths and request.num_return_sequences > widths[min(num_tokens, len(widths)) - 1]:
            raise InvalidRequest(
                f"num_return_sequences ({request.num_return_sequences}) must not be above the last number of beams in "
                "beam_width_array"
            )
        if sampling.temperature > 0:
            raise InvalidRequest(
                "beam search does not sample: leave out temperature, top_k, top_p, min_p and typical_p"
            )
        if width * max(2, 1 + len(set(request.end_ids))) > self.vocab_size:
            raise InvalidRequest(f"beam_width {width} is too large for a vocabulary of {self.vocab_size} tokens")
        output = request.output_config
        refused = {
            "repetition_penalty": sampling.repetition_penalty != 1,
            "presence_penalty": sampling.presence_penalty != 0,
            "frequency_penalty": sampling.frequency_penalty != 0,
            "logit_bias": bool(sampling.logit_bias),
            "embedding_bias": bool(sampling.embedding_bias),
            "guided_decoding_guide_type": request.guided_decoding_params is not None,
            "logits_post_processor_name": bool(request.logits_post_processor_name),
            "replay.sequences": request.replay is not None and bool(request.replay.sequences),
            "num_log_probs": output.num_log_probs > 0,
            "return_prompt_log_probs": output.return_prompt_log_probs,
            "return_context_logits": output.return_context_logits,
            "return_generation_logits": output.return_generation_logits,
            "additional_outputs": bool(output.additional_model_outputs),
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise InvalidRequest(f"{name} is not supported together with beam_width above 1")

    def validate_replay(self, request: Request, replay: Replay) -> None:
        """The part of `validate` that says whether `request` can begin with what `replay` holds."""
        if not replay.sequences:
            return
        if len(replay.sequences) != request.num_sequences or all(each.is_finished for each in replay.sequences):
            raise InvalidRequest("replay.sequences must hold every sequence of the request, one of them unfinished")
        name = "resume_token" if replay.is_resumed else "replay"
        longest = min(request.max_tokens, self.max_seq_len - len(request.input_token_ids))
        for each in replay.sequences:
            if len(each.token_ids) > longest:
                raise InvalidRequest(f"{name} has {len(each.token_ids)} tokens, more than the request can generate")
            if any(not 0 <= token < self.vocab_size for token in each.token_ids):
                raise InvalidRequest(f"{name} holds a token id outside [0, {self.vocab_size})")
            if not math.isfinite(each.cum_log_prob):
                raise InvalidRequest(f"cum_log_prob of {name} must be finite, got {each.cum_log_prob}")

    def _validate_drafts(self, request: Request) -> None:
        """Prompt lookup and lookahead decoding are ways to compute, which any request may leave open; drafts are given
        to be verified."""
        if request.ngram_config is not None:
            request.ngram_config.validate()
        if request.lookahead_config is not None:
            request.lookahead_config.validate()
        if request.draft_target_config is not None:
            request.draft_target_config.validate()
            if request.draft_target_config.max_draft_len and not self.has_draft_model:
                raise InvalidRequest(
                    "speculative_max_draft_len needs a draft model, and this engine has none (key "
                    "speculative_model_dir): leave it out or set it to 0"
                )
        if request.external_draft_tokens_config is None:
            return
        tokens = request.external_draft_tokens_config.tokens
        if len(tokens) > self.max_seq_len:
            raise InvalidRequest(f"draft_input_ids has {len(tokens)} tokens, more than max_seq_len {self.max_seq_len}")
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise InvalidRequest(f"draft_input_ids holds a token id outside [0, {self.vocab_size})")
        self._validate_draft_logits(request.external_draft_tokens_config)
        if request.follows_each_token:
            raise InvalidRequest(
                "draft_input_ids is not supported together with top_p_decay, a beam_width above 1 or a logits "
                "post-processor, which follow every single token"
            )
        if request.weighed_drafts is not None and request.guided_decoding_params is not None:
            raise InvalidRequest(
                "draft_logits and draft_acceptance_threshold are not supported together with guided decoding, whose "
                "masks they do not know: leave them out, and the drafts are compared with what is sampled"
            )

    def _validate_draft_logits(self, given: ExternalDraftTokensConfig) -> None:
        threshold = given.acceptance_threshold
        if threshold is not None and not 0.0 < threshold <= 1.0:
            raise InvalidRequest(f"draft_acceptance_threshold must be above 0 and at most 1, got {threshold}")
        if not given.logits:
            return
        if len(given.logits) > MAX_DRAFT_LOGITS_BYTES:
            raise InvalidRequest(f"draft_logits has {len(given.logits)} bytes, more than {MAX_DRAFT_LOGITS_BYTES}")
        if len(given.logits) != 4 * len(given.tokens) * self.vocab_size:
            raise InvalidRequest(
                f"draft_logits must hold one float32 for each of {len(given.tokens)} drafts and {self.vocab_size} "
                f"tokens of the vocabulary, got {len(given.logits)} bytes"
            )
        # One pass over all: the largest number is NaN if any is, and a row of nothing but -inf has no softmax.
        logits = np.frombuffer(given.logits, dtype="<f4").reshape(-1, self.vocab_size)
        if not np.isfinite(logits.max(axis=1)).all():
            raise InvalidRequest("draft_logits must hold numbers, in each row a finite one at least, and no infinity")

    def check_table(self, table: EmbeddingTable) -> None:
        """Raise InvalidRequest unless the table fits the network and has no more bytes than it may, whatever its
        numbers are. Before a token is made for each of its rows."""
        if not self.embedding_size:
            raise InvalidRequest("this model takes no embeddings: leave out prompt_embedding_table and prompt_embeds")
        if len(table.data) > self.max_prompt_embedding_bytes:
            raise InvalidRequest(
                f"the embeddings have {len(table.data)} bytes, more than max_prompt_embedding_bytes "
                f"{self.max_prompt_embedding_bytes}"
            )
        table.check_shape()
        if table.shape[1] != self.embedding_size:
            raise InvalidRequest(
                f"the embeddings have {table.shape[1]} features, but those of this model have {self.embedding_size}"
            )

    def _validate_prompt_tuning(self, request: Request, tuning: PromptTuningConfig) -> None:
        self.check_table(tuning.embedding_table)
        tuning.embedding_table.validate()
        extra_ids = tuning.input_token_extra_ids
        if extra_ids and len(extra_ids) != len(request.input_token_ids):
            raise InvalidRequest(
                f"prompt_table_extra_ids has {len(extra_ids)} entries for {len(request.input_token_ids)} prompt tokens"
            )
        if extra_ids and not (min(extra_ids) >= 0 and max(extra_ids) < 2**64):
            raise InvalidRequest("prompt_table_extra_ids must hold unsigned 64-bit integers")
        if request.output_config.return_prompt_log_probs:
            raise InvalidRequest(
                "return_prompt_log_probs is not supported together with embeddings of the request's own: "
                "their tokens have no probability"
            )

    def _validate_token_ids(self, request: Request) -> None:
        low, high = min(request.input_token_ids), max(request.input_token_ids)
        tuning = request.prompt_tuning_config
        end = self.vocab_size + (0 if tuning is None else tuning.embedding_table.num_rows)
        if low < 0 or high >= end:
            wrong = low if low < 0 else high
            where = "the vocabulary" if tuning is None else "the vocabulary and the rows of prompt_embedding_table"
            raise InvalidRequest(f"token id {wrong} is outside {where} [0, {end})")
        if len(request.end_ids) > self.max_end_ids:
            raise InvalidRequest(f"end_ids has {len(request.end_ids)} entries, more than {self.max_end_ids}")
        if any(not 0 <= token < self.vocab_size for token in request.end_ids):
            raise InvalidRequest(f"end_ids holds a token id outside [0, {self.vocab_size})")
        for name, words in (("stop_words", request.stop_words), ("bad_words", request.bad_words)):
            if len(words) > self.max_words:
                raise InvalidRequest(f"{name} has {len(words)} entries, more than {self.max_words}")
            if any(not word or min(word) < 0 or max(word) >= self.vocab_size for word in words):
                raise InvalidRequest(f"{name} holds an empty entry or a token id outside [0, {self.vocab_size})")
            longest = max(map(len, words), default=0)
            if len(words) * longest > self.max_words_tokens:
                raise InvalidRequest(
                    f"{name} has {len(words)} entries of up to {longest} tokens: more than {self.max_words_tokens}"
                )

    def tensor_bytes(self, request: Request) -> int:
        """Of all tensors that `request` asks for if it ends with its last token."""
        config, num_prompt = request.output_config, len(request.input_token_ids)
        num_generated = min(request.max_tokens, self.max_seq_len - num_prompt) * request.num_return_sequences
        outputs = config.additional_model_outputs
        num_scores = self.num_labels * sum(output.name == SCORES for output in outputs)
        outputs = [output for output in outputs if output.name != SCORES]
        num_pooled = sum(output.pooling is not None for output in outputs)
        num_contexts = sum(output.gather_context and output.pooling is None for output in outputs)
        of_prompt = config.return_context_logits * self.vocab_size + num_contexts * self.hidden_size
        of_prompt += config.return_prompt_log_probs * (1 + 2 * config.num_log_probs)
        of_sample = config.return_generation_logits * self.vocab_size + (len(outputs) - num_pooled) * self.hidden_size
        of_sample += 2 * config.num_log_probs
        return 4 * (num_prompt * of_prompt + num_generated * of_sample + num_pooled * self.hidden_size + num_scores)

    def _validate_outputs(self, request: Request) -> None:
        config = request.output_config
        if not 0 <= config.num_log_probs <= MAX_LOG_PROBS:
            raise InvalidRequest(f"num_log_probs must be between 0 and {MAX_LOG_PROBS}, got {config.num_log_probs}")
        names = [output.name for output in config.additional_model_outputs]
        unknown = [name for name in names if name not in self.model_outputs]
        if unknown:
            offered = ", ".join(self.model_outputs) or "none"
            raise InvalidRequest(
                f"additional_outputs names {unknown[0][:80]!r}, which this model does not offer; it offers: {offered}"
            )
        if len(set(names)) != len(names):
            raise InvalidRequest("additional_outputs names an output twice")
        for output in config.additional_model_outputs:
            num_tokens = len(request.input_token_ids) if output.pooling is not None else 1
            if not 0 <= output.first < num_tokens:
                raise InvalidRequest(
                    f"the first token that counts in a pooled output must be one of the prompt's {num_tokens}, got "
                    f"{output.first}: the text has none behind what stands before it"
                )
        num_bytes = self.tensor_bytes(request)
        if num_bytes > self.max_tensor_bytes:
            raise InvalidRequest(
                f"the logits, log probabilities and hidden states asked for take {num_bytes} bytes, more than "
                f"max_tensor_bytes_per_request {self.max_tensor_bytes}: ask for fewer of them or for fewer tokens"
            )

    def _validate_biases(self, sampling: SamplingConfig) -> None:
        if not -1 <= sampling.top_p_reset_ids < self.vocab_size:
            raise InvalidRequest(
                f"top_p_reset_ids must be -1 (none) or a token id below {self.vocab_size}, got "
                f"{sampling.top_p_reset_ids}"
            )
        if len(sampling.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias names {len(sampling.logit_bias)} tokens, more than {MAX_BIASED_TOKENS}")
        for token in sampling.logit_bias:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"logit_bias names token id {token}, which is outside [0, {self.vocab_size})")
        # Written so that NaN is refused.
        if not all(abs(bias) <= MAX_BIAS for bias in sampling.logit_bias.values()):
            raise InvalidRequest(f"logit_bias must hold numbers between -{MAX_BIAS:g} and {MAX_BIAS:g}")
        if not (np.abs(np.frombuffer(sampling.embedding_bias, dtype="<f4")) <= MAX_BIAS).all():
            raise InvalidRequest(f"embedding_bias must hold numbers between -{MAX_BIAS:g} and {MAX_BIAS:g}")
