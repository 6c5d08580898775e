"""How a request's next tokens may be guessed, so that one step verifies several of them: immutable values.

A guess never changes a token. A step samples at the place of each draft as it would without drafts, with the randomness
of (seed, position), and as many drafts are accepted as equal what was sampled before the first that does not. So
greedy and random output alike are token for token those without speculation, which is more than that sampled tokens
keep their distribution; but a draft that is merely likely, and not what the stream of the seed draws, is not accepted.
"""

from __future__ import annotations

import msgspec

from inflight.errors import InvalidRequest

MAX_DRAFT_LEN = 64
MAX_NGRAM_SIZE = 16
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


class ExternalDraftTokensConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The beginning of the output, as the client guesses it: verified in as few steps as the batch has room for.

    TensorRT-LLM's logits and acceptance threshold are refused by the server side: they accept drafts that are likely
    enough, which changes the output.
    """

    tokens: list[int]
    """The first is compared with what the prompt's last step samples; the others are verified by the steps after it,
    until one is wrong."""
