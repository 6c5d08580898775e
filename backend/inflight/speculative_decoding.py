"""How a request's next tokens may be guessed, so that one step verifies several of them: immutable values.

A guess never changes a token, unless it is given with logits or a threshold to be accepted by
(ExternalDraftTokensConfig). A step samples at the place of each draft as it would without drafts, with the randomness
of (seed, position), and as many drafts are accepted as equal what was sampled before the first that does not. So
greedy and random output alike are token for token those without speculation, which is more than that sampled tokens
keep their distribution; but a draft that is merely likely, and not what the stream of the seed draws, is not accepted.
"""

from __future__ import annotations

import msgspec

from inflight.errors import InvalidRequest

MAX_DRAFT_LEN = 64
MAX_NGRAM_SIZE = 16
MAX_WINDOW_SIZE = 64
MAX_VERIFICATION_SET_SIZE = 64
DEFAULT_NGRAM_SIZE = 3


class NGramDecodingConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prompt lookup: where the last tokens have stood in prompt or output before, what followed them there is the
    draft (Saxena 2023; TensorRT-LLM's NGramDecodingConfig). It pays where output repeats parts of the prompt."""

    max_draft_len: int = 8
    """Drafts of one step at most; 0 = no prompt lookup."""
    max_matching_ngram_size: int = DEFAULT_NGRAM_SIZE
    """The longest run of last tokens that is looked up, before shorter ones of at least two."""

    def validate(self) -> None:
        """Raise InvalidRequest if a value is out of its range."""
        if not 0 <= self.max_draft_len <= MAX_DRAFT_LEN:
            raise InvalidRequest(f"max_draft_len must be between 0 (off) and {MAX_DRAFT_LEN}, got {self.max_draft_len}")
        if not 1 <= self.max_matching_ngram_size <= MAX_NGRAM_SIZE:
            raise InvalidRequest(
                f"max_matching_ngram_size must be between 1 and {MAX_NGRAM_SIZE}, got {self.max_matching_ngram_size}"
            )


class LookaheadDecodingConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lookahead decoding: the model guesses its own later tokens, in places beyond the text (Fu et al. 2024, "Break the
    sequential dependency of LLM inference using lookahead decoding"; TensorRT-LLM's LookaheadDecodingConfig, with its
    defaults). It needs no text to copy from and no other model, and pays where places in a step cost little. As in
    TensorRT-LLM, (1, 1, 0) is off."""

    max_window_size: int = 4
    """Later tokens that are guessed at a time: W of the paper."""
    max_ngram_size: int = 3
    """Tokens of the n-grams that successive guesses form, and of which all but the first are drafts: N."""
    max_verification_set_size: int = 4
    """N-grams that are kept of each first token: G. The best one is verified; 0 = none is kept."""

    @property
    def is_off(self) -> bool:
        return self.max_ngram_size == 1

    def validate(self) -> None:
        """Raise InvalidRequest if a value is out of its range."""
        for name, value, least, most in (
            ("lookahead_window_size", self.max_window_size, 1, MAX_WINDOW_SIZE),
            ("lookahead_ngram_size", self.max_ngram_size, 1, MAX_NGRAM_SIZE),
            ("lookahead_verification_set_size", self.max_verification_set_size, 0, MAX_VERIFICATION_SET_SIZE),
        ):
            if not least <= value <= most:
                raise InvalidRequest(f"{name} must be between {least} and {most}, got {value}")
        if self.is_off and (self.max_window_size != 1 or self.max_verification_set_size):
            raise InvalidRequest(
                "lookahead_ngram_size 1 means no lookahead decoding: lookahead_window_size must then be 1 and "
                "lookahead_verification_set_size 0"
            )


class DraftTargetDecodingConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A draft model: a second, smaller network in the same ranks, whose tokens are the draft (Leviathan 2023;
    TensorRT-LLM's DraftTargetDecodingConfig). The engine's configuration says which one. It samples with the request's
    own options and with the randomness of the same (seed, position), so that random output accepts drafts, too."""

    max_draft_len: int = 4
    """Drafts of one step at most; 0 = none of the draft model."""

    def validate(self) -> None:
        """Raise InvalidRequest if a value is out of its range."""
        if not 0 <= self.max_draft_len <= MAX_DRAFT_LEN:
            raise InvalidRequest(
                f"speculative_max_draft_len must be between 0 (off) and {MAX_DRAFT_LEN}, got {self.max_draft_len}"
            )


NO_LOOKAHEAD = LookaheadDecodingConfig(max_window_size=1, max_ngram_size=1, max_verification_set_size=0)
NO_LOOKUP = NGramDecodingConfig(max_draft_len=0)
NO_DRAFT_MODEL = DraftTargetDecodingConfig(max_draft_len=0)


class SpeculativeDecodingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine guesses the tokens of requests that say nothing about it."""

    ngram: NGramDecodingConfig = NO_LOOKUP
    lookahead: LookaheadDecodingConfig = NO_LOOKAHEAD
    draft_target: DraftTargetDecodingConfig = NO_DRAFT_MODEL


NO_SPECULATION = SpeculativeDecodingConfig()


class ExternalDraftTokensConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The beginning of the output, as the client guesses it: verified in as few steps as the batch has room for.

    Tokens alone change nothing: a draft is accepted if it is what the model samples. With `logits` or an
    `acceptance_threshold` a draft d is accepted by its probability p(d) under the distribution that the request samples
    from, as long as all before it were. q(d) is that of the draft: under the softmax of its logits with the request's
    temperature, top_k, top_p and min_p, or 1 without logits.

    - logits alone: accepted with probability min(1, p(d) / q(d)), otherwise the token is sampled from max(p - q, 0),
      normalised (speculative sampling, Leviathan et al. 2023, Chen et al. 2023). If each draft was sampled from its q,
      the output has the distribution that it has without drafts. Greedy output does not change.
    - with the threshold t: accepted if p(d) >= t * q(d), otherwise the token is sampled from max(p - q, 0). This
      favours drafts and changes the output's distribution; greedy output too, whose p is taken at temperature 1 without
      filters, and which goes on with its likeliest token where a draft is rejected.

    Which tokens come out depends on the request alone, its seed included, not on how many drafts a step verifies.
    """

    tokens: list[int]
    """The first is compared with what the prompt's last step samples; the others are verified by the steps after it,
    until one is wrong."""
    logits: bytes = b""
    """What the drafts were sampled from, (tokens, vocabulary), row by row in little-endian float32; empty = unknown.
    Bytes, because lists of so many numbers would take the loop seconds to decode."""
    acceptance_threshold: float | None = None
    """0 < t <= 1."""
