"""A request as every rank receives it from the server side: an immutable value.

Does not know tritonserver's tensors, text, or how tokens are computed. Encoded with msgpack by :mod:`msgspec`; fields
that have their default value are not encoded.
"""

from __future__ import annotations

import math

import msgspec

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams

MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 1e-5
"""Smallest temperature of random sampling. Below it the likeliest token is drawn anyway, and far below it
1 / temperature overflows."""


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Every field has a value: the server side has replaced unset ones by defaults."""

    temperature: float = 0.0
    """0 chooses the likeliest token (greedy); otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches p; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest; 0 keeps all."""
    seed: int = 0
    """Key of the request's own random stream, 0 <= seed < 2**64."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occur in the prompt or the output become less likely (Keskar et al. 2019); 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that occurs in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each of its occurrences in the output."""
    min_tokens: int = 0
    """End tokens are not sampled before this many tokens have been generated."""


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank must report besides the tokens."""

    return_log_probs: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to be continued."""

    request_id: int
    """uint64, unique among the requests in flight of all fronts of the engine."""
    input_token_ids: list[int]
    max_tokens: int
    """At most this many new tokens, >= 1."""
    streaming: bool = False
    """True: a result per step; False: one result with all tokens at the end."""
    sampling_config: SamplingConfig = SamplingConfig()
    output_config: OutputConfig = OutputConfig()
    end_ids: list[int] = []
    """Any of these tokens ends the sequence (finish reason END_ID); empty = never."""
    stop_words: list[list[int]] = []
    """The sequence ends as soon as its last tokens equal one of these."""
    bad_words: list[list[int]] = []
    """Token sequences that must not occur in the output: their last token is not sampled after the others."""
    guided_decoding_params: GuidedDecodingParams | None = None
    """The grammar that the output follows; None = any output. An output that is cut by `max_tokens` is the beginning of
    one that does. Needs `end_ids`, which are sampled only where the grammar may end, and then whatever `min_tokens` and
    `bad_words` leave; where these leave nothing that the grammar allows, the grammar alone decides."""
    priority: float = 0.5
    """0 to 1; higher ones start first, equal ones in order of arrival."""
    allotted_time_ms: int = 0
    """The request is ended this long after the leader received it, whether it is waiting or active; 0 = no limit."""
    client_id: str = ""
    """The client's own request id as tritonserver passed it; used in messages only."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same salt."""
    num_return_sequences: int = 1
    """Independent continuations of the prompt. Must be 1: more are not supported."""
    generated_token_ids: list[int] = []
    """Set when ranks take over a request from ranks that died: tokens that the client has already received. Generation
    continues after them with the tokens that the earlier ranks would have generated. They count as generated tokens,
    not as prompt, wherever that matters, and are not returned again."""
    cum_log_prob: float = 0.0
    """Sum of the log probabilities of `generated_token_ids`."""


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
    max_words: int = 2048
    """Maximum number of stop words, and of bad words, of one request: 1024, each with and without a leading space."""
    max_words_tokens: int = 32768
    """Maximum number of words times the length of the longest: every step compares each word with its row's end."""

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest with the reason if `request` can never be served."""
        tokens = request.input_token_ids
        if not tokens:
            raise InvalidRequest("the prompt is empty: give at least one token")
        if len(tokens) > self.max_input_len:
            raise InvalidRequest(f"the prompt has {len(tokens)} tokens, more than max_input_len {self.max_input_len}")
        if not 1 <= request.max_tokens < 2**31 - 1:
            raise InvalidRequest(f"max_tokens must be between 1 and {2**31 - 2}, got {request.max_tokens}")
        if len(tokens) >= self.max_seq_len:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens and leaves no room for a new one within max_seq_len "
                f"{self.max_seq_len}"
            )
        num_generated = len(request.generated_token_ids)
        if num_generated > min(request.max_tokens, self.max_seq_len - len(tokens)):
            raise InvalidRequest(f"generated_token_ids has {num_generated} tokens, more than the request can generate")
        if self.longest(request) > self.kv_cache_tokens:
            raise InvalidRequest(
                f"the request needs room for {self.longest(request)} tokens, more than the whole KV cache holds "
                f"({self.kv_cache_tokens}): ask for fewer tokens"
            )
        self._validate_token_ids(request)
        if not math.isfinite(request.cum_log_prob):
            raise InvalidRequest(f"cum_log_prob must be finite, got {request.cum_log_prob}")
        self.validate_sampling(request.sampling_config)
        if request.guided_decoding_params is not None:
            request.guided_decoding_params.validate()
            if not request.end_ids:
                raise InvalidRequest("guided decoding needs an end token: set end_id to a token, not to -1")
        if request.num_return_sequences != 1:
            raise InvalidRequest(f"num_return_sequences must be 1, got {request.num_return_sequences}")
        if not 0.0 <= request.priority <= 1.0:
            raise InvalidRequest(f"priority must be between 0 and 1, got {request.priority}")

    def longest(self, request: Request) -> int:
        """Most tokens that `request` can hold in the KV cache: its last token is sampled but never computed."""
        return min(len(request.input_token_ids) + request.max_tokens, self.max_seq_len) - 1

    def _validate_token_ids(self, request: Request) -> None:
        low, high = min(request.input_token_ids), max(request.input_token_ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary [0, {self.vocab_size})")
        for name, token_ids in (("end_ids", request.end_ids), ("generated_token_ids", request.generated_token_ids)):
            if any(not 0 <= token < self.vocab_size for token in token_ids):
                raise InvalidRequest(f"{name} holds a token id outside [0, {self.vocab_size})")
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

    @staticmethod
    def validate_sampling(sampling: SamplingConfig) -> None:
        """Raise InvalidRequest, with one sentence, if a value is out of its range."""
        checks = (
            (
                "temperature",
                sampling.temperature,
                sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature < math.inf,
                f"0 (greedy) or a finite number of at least {MIN_TEMPERATURE}",
            ),
            ("top_k", sampling.top_k, 0 <= sampling.top_k < 2**31, "between 0 (off) and 2147483647"),
            ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "between 0 and 1"),
            ("seed", sampling.seed, 0 <= sampling.seed <= MAX_SEED, "an unsigned 64-bit integer"),
            ("repetition_penalty", sampling.repetition_penalty, 0.0 < sampling.repetition_penalty < math.inf, "> 0"),
            ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "finite"),
            ("frequency_penalty", sampling.frequency_penalty, math.isfinite(sampling.frequency_penalty), "finite"),
            ("min_tokens", sampling.min_tokens, sampling.min_tokens >= 0, ">= 0"),
        )
        for name, value, holds, rule in checks:
            if not holds:
                raise InvalidRequest(f"{name} must be {rule}, got {value}")
