"""Plain values of the public interface: options of a request, chunks of an answer, the whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import TypedDict


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. For one that is left out (or None) the server's default applies."""

    max_tokens: int
    """Maximum number of new tokens; default 128."""
    min_tokens: int | None
    """Minimum number of new tokens: the answer does not end earlier."""
    temperature: float | None
    """0 chooses the likeliest token."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    """0 <= seed < 2**64; the same seed gives the same text."""
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    """No run of so many tokens occurs twice in prompt and answer."""
    top_p_decay: float | None
    """After each token top_p becomes max(top_p * top_p_decay, top_p_min)."""
    top_p_min: float | None
    top_p_reset_ids: int | None
    """Token that sets top_p back."""
    stop_words: Sequence[str] | None
    """The answer ends before the first occurrence of one of these strings."""
    bad_words: Sequence[str] | None
    """Strings that are never generated."""
    end_id: int | None
    """Token that ends the answer; -1 for none."""
    pad_id: int | None
    guided_decoding_guide_type: str | None
    """json, json_schema, regex, ebnf_grammar or structural_tag: what the answer follows."""
    guided_decoding_guide: str | None
    """The schema, expression, grammar or tags; left out for json."""
    exclude_input_in_output: bool
    """Leave the prompt out of the text; default True."""
    return_log_probs: bool
    """Fill `log_probs` and `cum_log_probs`."""


@dataclass(frozen=True)
class Chunk:
    """One response of a stream: text and tokens since the previous one. A busy server joins several tokens into one."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """"stop", "length", "cancelled" … on the last chunk, None before."""
    log_probs: tuple[float, ...] = ()
    """Natural log probability of each token, if requested."""
    cum_log_probs: float | None = None
    """Sum of the log probabilities of the answer so far, if requested."""
    num_input_tokens: int | None = None
    """Tokens of the prompt."""
    num_output_tokens: int = 0
    """Tokens generated since the previous chunk."""


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int = 0
    log_probs: tuple[float, ...] = ()
    cum_log_probs: float | None = None
    request_id: str = field(default="", compare=False)


@dataclass
class CompletionBuilder:
    """Joins the chunks of an answer into a Completion."""

    request_id: str = ""
    _chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def build(self) -> Completion:
        chunks = self._chunks
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason=_last(chunk.finish_reason for chunk in chunks),
            num_input_tokens=_last(chunk.num_input_tokens for chunk in chunks),
            num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
            log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
            cum_log_probs=_last(chunk.cum_log_probs for chunk in chunks),
            request_id=self.request_id,
        )


_T = TypeVar("_T")


def _last(values: Iterable[_T | None]) -> _T | None:
    """The last value that is not None, or None."""
    found = None
    for value in values:
        found = value if value is not None else found
    return found
