"""A client's request independent of its dialect: values as the client sent them, before defaults and tokenising."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from inflight.context_phase import RequestType
from inflight.errors import InvalidRequest
from inflight.prompt_tuning import EmbeddingTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """None always means that the client did not set the field."""

    batch_index: int | None = None
    """Its number among the prompts of one request; None = the request has no other."""
    text: str | None = None
    images: list[str] | None = None
    """In base64: files of the images whose placeholders `text` has."""
    input_ids: list[int] | None = None
    input_length: int | None = None
    """How many of `input_ids` count: the others are padding."""
    sequences: list[list[int]] | None = None
    """Token ids that are to become text: this is no prompt."""
    sequence_lengths: list[int] | None = None
    """How many of each of `sequences` count: the others are padding."""
    passages: list[str] | None = None
    """What is held against `text`, each by itself."""
    dimensions: int | None = None
    """So many features of a text's vector are answered."""
    prompt_name: str | None = None
    """Of what the checkpoint has to stand before the text; empty, as by clients that fill every tensor, counts as
    unset."""
    input_type: str | None = None
    """Chooses that by what the text is; empty counts likewise."""
    truncate: str | None = None
    """Which end of a text is cut off that is too long: NONE, START or END."""
    max_tokens: int | None = None
    stream: bool = False
    stop: bool = False
    """True: this is no prompt, but asks to stop the request in flight with the same Triton id."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    num_return_sequences: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    beam_width_array: list[int] | None = None
    beam_search_diversity_rate: float | None = None
    no_repeat_ngram_size: int | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    logit_bias_ids: list[int] | None = None
    logit_bias_values: list[float] | None = None
    embedding_bias: bytes | None = None
    """Little-endian float32 for each token of the vocabulary; b"" = none."""
    embedding_bias_words: list[str] | None = None
    embedding_bias_weights: list[float] | None = None
    """Added to every token of the word at the same place."""

    stop_words: list[str] | None = None
    """Strings that end the output, also where they begin or end inside a token."""
    stop_word_ids: list[list[int]] | None = None
    """Token sequences that end the output."""
    bad_words: list[str] | None = None
    bad_word_ids: list[list[int]] | None = None
    end_id: int | None = None
    """-1: no token ends the output; None: the checkpoint's own end tokens do."""
    pad_id: int | None = None
    """Without effect: outputs are padded with -1."""

    guide_type: str | None = None
    guide: str | None = None
    guide_is_strict: bool = True
    """False: what cannot be enforced is left out, and named in the answer."""
    guide_white_space: str | None = None
    """A WhiteSpace; empty, as by clients that fill every tensor, counts as unset."""
    guide_backend: str | None = None
    """The library that is to follow it, in vLLM's words."""
    logits_post_processor_name: str | None = None
    """Empty, as by clients that fill every tensor, counts as unset."""

    max_draft_len: int | None = None
    max_matching_ngram_size: int | None = None
    speculative_max_draft_len: int | None = None
    draft_input_ids: list[int] | None = None
    draft_logits: NDArray[Any] | None = None
    """[drafts, vocabulary], float32; empty, as by clients that fill every tensor, counts as unset."""
    draft_acceptance_threshold: float | None = None
    lookahead_window_size: int | None = None
    lookahead_ngram_size: int | None = None
    lookahead_verification_set_size: int | None = None

    lora_name: str | None = None
    lora_task_id: int | None = None
    lora_weights: NDArray[Any] | None = None
    """[rows, elements], float16."""
    lora_config: NDArray[Any] | None = None
    """[rows, 3]"""
    lora_order: str | None = None
    """load or unload: this is no prompt, but an order that concerns the adapter."""

    exclude_input_in_output: bool | None = None
    shows_special: bool = False
    """Whether special tokens have text, but for those that end the output."""
    return_log_probs: bool = False
    num_log_probs: int | None = None
    return_prompt_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    additional_outputs: list[str] | None = None
    """Names of tensors of the network."""
    gather_context: bool = False
    """Those of the prompt's tokens, too."""
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_perf_metrics: bool = False
    return_resume_token: bool = False
    resume_token: str | None = None
    """What the client has of the same request from a server that ended; empty, as by clients that fill every tensor,
    counts as unset."""
    request_type: RequestType = RequestType.CONTEXT_AND_GENERATION
    context_phase_params: bytes | None = None
    """Those that the context-only request was answered with."""
    # What only switches an output on, where a dialect has a tensor for that.
    return_finish_reason: bool = False
    return_stop_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False

    retention_starts: list[int] | None = None
    """Of token ranges: this and the next three have an entry for each."""
    retention_ends: list[int] | None = None
    """-1: to the prompt's end."""
    retention_priorities: list[int] | None = None
    retention_durations_ms: list[int] | None = None
    """-1: for good."""
    retention_decode_priority: int | None = None
    retention_decode_duration_ms: int | None = None

    priority: float | None = None
    allotted_time_ms: int | None = None
    cache_salt: str | None = None

    prompt_embedding_table: EmbeddingTable | None = None
    """Embeddings of token ids beyond the vocabulary. With a text they all stand before it."""
    prompt_vocab_size: int | None = None
    """The number of rows of that table."""
    prompt_table_extra_ids: list[int] | None = None
    """One for each token of the prompt, or one for all that are rows of the table."""
    prompt_embeds: EmbeddingTable | None = None
    """Embeddings of the whole prompt, instead of text or token ids."""

    @property
    def may_leave_out(self) -> bool:
        """Whether its guide may be followed in part."""
        return not self.guide_is_strict

    @property
    def is_context_only(self) -> bool:
        """Whether it asks for its first tokens, and for what another engine needs to go on."""
        return self.request_type is RequestType.CONTEXT_ONLY

    @property
    def is_one_of_several(self) -> bool:
        """Whether its request has other prompts."""
        return self.batch_index is not None

    @property
    def has_several_sequences(self) -> bool:
        """Whether it asks for several continuations that are no beams of a search."""
        return (self.num_return_sequences or 1) > 1 and (self.beam_width or 1) == 1

    @property
    def prompt_ids(self) -> list[int] | None:
        """`input_ids` without their padding. Raises InvalidRequest if there are fewer than `input_length`."""
        if self.input_ids is None or self.input_length is None:
            return self.input_ids
        if not 0 <= self.input_length <= len(self.input_ids):
            raise InvalidRequest(
                f"input_lengths is {self.input_length}, but input_ids has {len(self.input_ids)} tokens"
            )
        return self.input_ids[: self.input_length]
