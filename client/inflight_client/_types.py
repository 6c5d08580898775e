"""Plain values of the public interface: options of a request, chunks of an answer, the whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt
from typing_extensions import TypedDict

Matrix = npt.NDArray[Any]
Prompt = str | Sequence[int] | Matrix
"""A text, token ids, or the embeddings of the whole prompt, (tokens, features), sent in float32."""


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
    typical_p: float | None
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
    """json, json_schema, regex, ebnf_grammar, lark_grammar, choice or structural_tag: what the answer follows."""
    guided_decoding_guide: str | None
    """The schema, expression, grammar, texts or tags; left out for json."""
    guided_decoding_strict: bool | None
    """False: what of a schema cannot be enforced is left out, where the request would be refused."""
    guided_decoding_white_space: str | None
    """Of JSON: dumps, compact or free."""
    max_draft_len: int | None
    """Prompt lookup: what followed the last tokens where they stood before is verified, so many tokens in a step; 0 for
    none. Changes no token; faster where the answer repeats parts of the prompt."""
    max_matching_ngram_size: int | None
    """Of the last tokens, how many are looked up at most."""
    speculative_max_draft_len: int | None
    """Drafts that the engine's draft model makes in a step; 0 for none. Changes no token."""
    draft_input_ids: Sequence[int] | None
    """What the answer is expected to begin with. Changes no token; faster as far as it is right."""
    draft_logits: Matrix | None
    """(drafts, vocabulary): what each draft was sampled from. Then drafts are accepted by their probability, so that
    they decide about tokens, whose distribution stays what it is without them (speculative sampling)."""
    draft_acceptance_threshold: float | None
    """A draft is accepted if its probability is at least this times that under `draft_logits`, or this if there are
    none. Changes the answer in favour of the drafts."""
    lookahead_window_size: int | None
    """Lookahead decoding: the model guesses so many later tokens in each step. Changes no token; set all three."""
    lookahead_ngram_size: int | None
    """Tokens of the n-grams that its guesses form."""
    lookahead_verification_set_size: int | None
    """N-grams that are kept of each first token."""
    logits_post_processor_name: str | None
    """One of the server's functions that change logits."""
    lora_name: str | None
    """The server's LoRA adapter that the answer is generated with."""
    lora_task_id: int | None
    """The same by number, of an adapter whose weights were sent before."""
    exclude_input_in_output: bool
    """Leave the prompt out of the text; default True."""
    return_log_probs: bool
    """Fill `log_probs` and `cum_log_probs`."""
    num_log_probs: int | None
    """Fill `top_log_probs` with so many of the most likely tokens in the place of each generated one."""
    return_perf_metrics: bool
    """Fill `total_draft_tokens` and `total_accepted_draft_tokens`."""
    return_prompt_log_probs: bool
    """Fill `prompt_log_probs`; with `num_log_probs` also `prompt_top_log_probs`."""
    num_return_sequences: int | None
    """Independent continuations of the prompt; each chunk names its own by `sequence_index`."""
    beam_width: int | None
    """Above 1: beam search with so many beams, of which the `num_return_sequences` best are returned. In a stream the
    text and tokens of a chunk are all of its sequence so far, and replace those of the chunk before."""
    length_penalty: float | None
    """Of beam search: scores are log probabilities divided by length ** length_penalty."""
    early_stopping: int | None
    """Of beam search: 1 stops as soon as there are `beam_width` finished hypotheses; 0 (the default) when the best beam
    is not better at its present length, any other number when it cannot become better."""
    beam_width_array: Sequence[int] | None
    """Of beam search: how many beams go on after each step, at most `beam_width`; the last holds for all later ones."""
    beam_search_diversity_rate: float | None
    """Of beam search: continuations of the beam of rank r count as more likely by r times this; 0 is off."""
    logit_bias: Mapping[int, float] | None
    """Token ids and what is added to their logits."""
    prompt_embedding_table: Matrix | None
    """Embeddings, (rows, features), sent in float16: of the prompt's token ids from the size of the vocabulary on, or
    to stand before a text."""
    prompt_table_extra_ids: Sequence[int] | None
    """One for each token of the prompt, or one for all rows: only requests with equal ones share cached prefixes."""


class TokenLogProb(NamedTuple):
    """A token and its natural log probability."""

    token_id: int
    log_prob: float


TopLogProbs = tuple[tuple[TokenLogProb, ...], ...]
"""The `num_log_probs` most likely tokens in the place of each token, the likeliest first."""


@dataclass(frozen=True)
class Chunk:
    """One response of a stream: text and tokens of one sequence since its previous one. A busy server joins several
    tokens into one."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """"stop", "length", "cancelled" … on the last chunk of the sequence, None before."""
    log_probs: tuple[float, ...] = ()
    """Natural log probability of each token, if requested."""
    cum_log_probs: float | None = None
    """Sum of the log probabilities of the sequence so far, if requested."""
    num_input_tokens: int | None = None
    """Tokens of the prompt."""
    num_output_tokens: int = 0
    """Tokens generated since the previous chunk of the sequence."""
    sequence_index: int = 0
    """The sequence that text and tokens belong to, below `num_return_sequences`."""
    top_log_probs: TopLogProbs = ()
    """For each token the most likely ones in its place, if requested."""
    prompt_log_probs: tuple[float, ...] = ()
    """On the first chunk of sequence 0, if requested: the log probability of each prompt token but the first."""
    prompt_top_log_probs: TopLogProbs = ()
    """The most likely tokens in the places of those, if both are requested."""
    total_draft_tokens: int | None = None
    """On the last chunk, if `return_perf_metrics` is set: draft tokens that were verified for the whole request."""
    total_accepted_draft_tokens: int | None = None
    """Of these, the ones that became output."""
    guide_not_enforced: tuple[str, ...] = ()
    """On the last chunk, if `guided_decoding_strict` is false: JSON pointer and keyword of each thing that the schema
    says and the answer need not follow."""


@dataclass(frozen=True)
class GeneratedSequence:
    """One continuation of the prompt."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    num_output_tokens: int = 0
    log_probs: tuple[float, ...] = ()
    cum_log_probs: float | None = None
    top_log_probs: TopLogProbs = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer. `text`, `token_ids` and so on are those of its first sequence, which mostly is the only one."""

    sequences: tuple[GeneratedSequence, ...]
    """All `num_return_sequences` of them, in the order of their indices; of an unfinished answer those that have begun,
    at least one."""
    num_input_tokens: int | None = None
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: TopLogProbs = ()
    total_draft_tokens: int | None = None
    total_accepted_draft_tokens: int | None = None
    guide_not_enforced: tuple[str, ...] = ()
    request_id: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.sequences[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.sequences[0].finish_reason

    @property
    def log_probs(self) -> tuple[float, ...]:
        return self.sequences[0].log_probs

    @property
    def cum_log_probs(self) -> float | None:
        return self.sequences[0].cum_log_probs

    @property
    def top_log_probs(self) -> TopLogProbs:
        return self.sequences[0].top_log_probs

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens of all sequences together."""
        return sum(sequence.num_output_tokens for sequence in self.sequences)


@dataclass
class CompletionBuilder:
    """Joins the chunks of an answer into a Completion."""

    request_id: str = ""
    has_beams: bool = False
    """Each chunk of a sequence replaces those before it, because a beam may be given up for another."""
    _chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def build(self) -> Completion:
        chunks = self._chunks
        sequences: list[list[Chunk]] = [[]]
        for chunk in chunks:
            while len(sequences) <= chunk.sequence_index:
                sequences.append([])
            sequences[chunk.sequence_index].append(chunk)
        return Completion(
            sequences=tuple(_joined(of_one[-1:] if self.has_beams else of_one) for of_one in sequences),
            num_input_tokens=_last(chunk.num_input_tokens for chunk in chunks),
            prompt_log_probs=tuple(value for chunk in chunks for value in chunk.prompt_log_probs),
            prompt_top_log_probs=tuple(top for chunk in chunks for top in chunk.prompt_top_log_probs),
            total_draft_tokens=_last(chunk.total_draft_tokens for chunk in chunks),
            total_accepted_draft_tokens=_last(chunk.total_accepted_draft_tokens for chunk in chunks),
            guide_not_enforced=tuple(each for chunk in chunks for each in chunk.guide_not_enforced),
            request_id=self.request_id,
        )


def _joined(chunks: list[Chunk]) -> GeneratedSequence:
    return GeneratedSequence(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=_last(chunk.finish_reason for chunk in chunks),
        num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
        log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
        cum_log_probs=_last(chunk.cum_log_probs for chunk in chunks),
        top_log_probs=tuple(top for chunk in chunks for top in chunk.top_log_probs),
    )


_T = TypeVar("_T")


def _last(values: Iterable[_T | None]) -> _T | None:
    """The last value that is not None, or None."""
    found = None
    for value in values:
        found = value if value is not None else found
    return found
