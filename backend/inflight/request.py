"""A request as every rank receives it from the server side: an immutable value.

Does not know tritonserver's tensors, text, or how tokens are computed. Encoded with msgpack by :mod:`msgspec`; fields
that have their default value are not encoded.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams

MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 1e-5
"""Smallest temperature of random sampling. Below it the likeliest token is drawn anyway, and far below it
1 / temperature overflows."""
MAX_BIAS = float(np.float32(1e30))
"""Largest magnitude of a logit bias: no sum or product of the sampler that it takes part in overflows. As a client of
the server can send it: the float32 next to 1e30 is larger than that."""
MAX_PENALTY = float(np.float32(1e20))
"""Largest magnitude of presence and frequency penalties, for the same reason: the latter are multiplied by counts."""
MAX_REPETITION_PENALTY = 1e6
MIN_REPETITION_PENALTY = float(np.float32(1e-6))
"""Bounds of repetition penalties: for the same reason, as they multiply and divide biased logits."""
MAX_BIASED_TOKENS = 4096
"""Entries of `SamplingConfig.logit_bias`."""
MAX_LOG_PROBS = 20
"""Of `OutputConfig.num_log_probs`."""
MAX_NGRAM_SIZE = 64
"""Of `SamplingConfig.no_repeat_ngram_size`: every step compares so many tokens at each place of the text."""


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Every field has a value: the server side has replaced unset ones by defaults."""

    temperature: float = 0.0
    """0 chooses the likeliest token (greedy); otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches p; 1 keeps all."""
    top_p_decay: float = 1.0
    """After each generated token p becomes max(p * top_p_decay, top_p_min), as in TensorRT-LLM (factual-nucleus
    sampling, Lee et al. 2022); 1 leaves p as it is."""
    top_p_min: float = 1e-6
    """The least that p decays to."""
    top_p_reset_ids: int = -1
    """A generated token with this id sets p back to `top_p` instead; -1 = none. One id, in spite of its name in
    TensorRT-LLM."""
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
    no_repeat_ngram_size: int = 0
    """No run of so many tokens of prompt and output occurs twice: the token that would complete the second is not
    sampled, as by transformers' NoRepeatNGramLogitsProcessor; 0 = off."""
    beam_width: int = 1
    """Above 1: beam search as transformers' `generate(num_beams=...)` does it, with so many beams, of which the
    `num_return_sequences` best hypotheses are returned at the end."""
    length_penalty: float = 1.0
    """Of beam search: hypotheses are ranked by their log probability divided by length ** length_penalty."""
    early_stopping: int = 0
    """Of beam search, once there are `beam_width` hypotheses. 1: stop; 0: stop if the best beam has a lower score at
    its present length than the worst of them; any other number: only if it cannot get a higher one at any length."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, before penalties and temperature (TensorRT-LLM and vLLM agree in that).
    Log probabilities that are returned do not contain it."""
    embedding_bias: bytes = b""
    """The same for the whole vocabulary, besides `logit_bias`: one little-endian float32 for each token. Empty = none.
    Bytes, because a list of so many numbers would take the loop milliseconds to decode."""


class AdditionalModelOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor inside the network that a request wants to see."""

    name: str
    """One of `RequestLimits.model_outputs`."""
    gather_context: bool = False
    """Of the prompt's tokens, too: as a tensor of its own, whose name is `name` behind context_."""


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank must report besides the tokens, all of it under the model's raw distribution: before biases,
    penalties, temperature and filters.

    All but the first come as `Result.tensors`, in float32 where not said otherwise. Of what is asked of the prompt, its
    own tokens are computed even where their keys and values are in the cache: such a request reuses no prefix.
    """

    return_log_probs: bool = False
    """Of each generated token, in `Result.log_probs`."""
    num_log_probs: int = 0
    """So many of the likeliest tokens at each generated one: top_token_ids (int32) and top_log_probs, (tokens, n),
    falling. With `return_prompt_log_probs` also prompt_top_token_ids and prompt_top_log_probs, (prompt - 1, n)."""
    return_prompt_log_probs: bool = False
    """prompt_log_probs, (prompt - 1,): of each prompt token but the first, given those before it."""
    return_context_logits: bool = False
    """context_logits, (prompt, vocabulary): behind each prompt token."""
    return_generation_logits: bool = False
    """generation_logits, (tokens, vocabulary): those that each generated token was chosen by."""
    additional_model_outputs: list[AdditionalModelOutput] = []
    """Tensors of the network by name, (tokens, features)."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to be continued."""

    request_id: int = 0
    """uint64, unique among the requests in flight of all fronts of the engine. 0: Executor.enqueue_request draws it."""
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
    """The client's own id of the request. Every Response repeats it; the engine only uses it in messages."""
    return_all_generated_tokens: bool = False
    """True: each streamed Result holds all tokens generated so far, with their log probabilities, not only new ones."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same salt."""
    num_return_sequences: int = 1
    """Independent continuations of the prompt, which is computed once for all of them. Each samples from a stream of
    its own, see `sequence_seed`; greedy ones are all equal. Of a beam search: how many of its hypotheses are returned,
    at most `beam_width`."""
    generated_token_ids: list[int] = []
    """Set when ranks take over a request from ranks that died: tokens that the client has already received. Generation
    continues after them with the tokens that the earlier ranks would have generated. They count as generated tokens,
    not as prompt, wherever that matters, and are not returned again."""
    cum_log_prob: float = 0.0
    """Sum of the log probabilities of `generated_token_ids`."""

    @property
    def num_sequences(self) -> int:
        """Rows of a batch that it takes: one for each of its sequences, or beams."""
        return max(self.num_return_sequences, self.sampling_config.beam_width)


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
    hidden_size: int = 0
    """Features of a hidden state."""
    model_outputs: list[str] = []
    """Names that `AdditionalModelOutput` may have."""
    max_tensor_bytes: int = 2**28
    """Of all tensors that one request asks for: they are held on the host until it takes them."""
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
        self._validate_sequences(request)
        if request.sampling_config.beam_width > 1:
            self._validate_beams(request)
        self._validate_biases(request.sampling_config)
        self._validate_outputs(request)
        if request.guided_decoding_params is not None:
            request.guided_decoding_params.validate()
            if not request.end_ids:
                raise InvalidRequest("guided decoding needs an end token: set end_id to a token, not to -1")
        if not 0.0 <= request.priority <= 1.0:
            raise InvalidRequest(f"priority must be between 0 and 1, got {request.priority}")

    def longest(self, request: Request) -> int:
        """Most tokens that `request` can hold in the KV cache: its last token is sampled but never computed."""
        return min(len(request.input_token_ids) + request.max_tokens, self.max_seq_len) - 1

    def _validate_sequences(self, request: Request) -> None:
        num_sequences = request.num_return_sequences
        if not 1 <= num_sequences <= self.max_batch_size:
            raise InvalidRequest(
                f"num_return_sequences must be between 1 and max_batch_size {self.max_batch_size}, got {num_sequences}"
            )
        if num_sequences > 1 and request.generated_token_ids:
            raise InvalidRequest("generated_token_ids cannot be given for a request of several sequences")

    def _validate_beams(self, request: Request) -> None:
        """What has no meaning for a beam, or is not done, is refused."""
        sampling, width = request.sampling_config, request.sampling_config.beam_width
        name, most = "max_batch_size", self.max_batch_size
        if 0 < self.max_beam_width < most:
            name, most = "max_beam_width", self.max_beam_width
        if width > most:
            raise InvalidRequest(f"beam_width must be between 1 and {name} {most}, got {width}")
        if request.num_return_sequences > width:
            raise InvalidRequest(
                f"num_return_sequences ({request.num_return_sequences}) must not be above beam_width ({width})"
            )
        if request.streaming:
            raise InvalidRequest(
                "a beam search cannot be streamed, because any beam may still be given up: stream must be false"
            )
        if sampling.temperature > 0:
            raise InvalidRequest("beam search does not sample: leave out temperature, top_k, top_p and min_p")
        if width * max(2, 1 + len(set(request.end_ids))) > self.vocab_size:
            raise InvalidRequest(f"beam_width {width} is too large for a vocabulary of {self.vocab_size} tokens")
        output = request.output_config
        refused = {
            "repetition_penalty": sampling.repetition_penalty != 1,
            "presence_penalty": sampling.presence_penalty != 0,
            "frequency_penalty": sampling.frequency_penalty != 0,
            "logit_bias": bool(sampling.logit_bias),
            "embedding_bias": bool(sampling.embedding_bias),
            "stop_words": bool(request.stop_words),
            "guided_decoding_guide_type": request.guided_decoding_params is not None,
            "generated_token_ids": bool(request.generated_token_ids),
            "num_log_probs": output.num_log_probs > 0,
            "return_prompt_log_probs": output.return_prompt_log_probs,
            "return_context_logits": output.return_context_logits,
            "return_generation_logits": output.return_generation_logits,
            "additional_outputs": bool(output.additional_model_outputs),
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise InvalidRequest(f"{name} is not supported together with beam_width above 1")

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

    def tensor_bytes(self, request: Request) -> int:
        """Of all tensors that `request` asks for if it ends with its last token."""
        config, num_prompt = request.output_config, len(request.input_token_ids)
        num_generated = min(request.max_tokens, self.max_seq_len - num_prompt) * request.num_return_sequences
        outputs = config.additional_model_outputs
        num_contexts = sum(output.gather_context for output in outputs)
        of_prompt = config.return_context_logits * self.vocab_size + num_contexts * self.hidden_size
        of_prompt += config.return_prompt_log_probs * (1 + 2 * config.num_log_probs)
        of_sample = config.return_generation_logits * self.vocab_size + len(outputs) * self.hidden_size
        of_sample += 2 * config.num_log_probs
        return 4 * (num_prompt * of_prompt + num_generated * of_sample)

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
        if not sampling.embedding_bias:
            return
        if len(sampling.embedding_bias) != 4 * self.vocab_size:
            raise InvalidRequest(
                f"embedding_bias must hold one float32 for each of the {self.vocab_size} tokens of the vocabulary, "
                f"got {len(sampling.embedding_bias)} bytes"
            )
        if not (np.abs(np.frombuffer(sampling.embedding_bias, dtype="<f4")) <= MAX_BIAS).all():
            raise InvalidRequest(f"embedding_bias must hold numbers between -{MAX_BIAS:g} and {MAX_BIAS:g}")

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
            ("top_p_decay", sampling.top_p_decay, 0.0 < sampling.top_p_decay <= 1.0, "above 0 and at most 1"),
            ("top_p_min", sampling.top_p_min, 0.0 < sampling.top_p_min <= 1.0, "above 0 and at most 1"),
            ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "between 0 and 1"),
            ("seed", sampling.seed, 0 <= sampling.seed <= MAX_SEED, "an unsigned 64-bit integer"),
            (
                "repetition_penalty",
                sampling.repetition_penalty,
                MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY,
                f"between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}",
            ),
            *(
                (name, value, abs(value) <= MAX_PENALTY, f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}")
                for name, value in (
                    ("presence_penalty", sampling.presence_penalty),
                    ("frequency_penalty", sampling.frequency_penalty),
                )
            ),
            ("min_tokens", sampling.min_tokens, sampling.min_tokens >= 0, ">= 0"),
            ("beam_width", sampling.beam_width, sampling.beam_width >= 1, ">= 1"),
            ("length_penalty", sampling.length_penalty, abs(sampling.length_penalty) <= 8, "between -8 and 8"),
            (
                "no_repeat_ngram_size",
                sampling.no_repeat_ngram_size,
                0 <= sampling.no_repeat_ngram_size <= MAX_NGRAM_SIZE,
                f"between 0 (off) and {MAX_NGRAM_SIZE}",
            ),
        )
        for name, value, holds, rule in checks:
            if not holds:
                raise InvalidRequest(f"{name} must be {rule}, got {value}")
