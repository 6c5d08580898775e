"""How a request chooses its tokens: an immutable value, with the bounds of each option."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from inflight.errors import InvalidRequest

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
MAX_DIVERSITY_RATE = 1e6
"""Of beam search: times the number of beams it is a small float32."""
MAX_BEAM_WIDTHS = 1024
"""Entries of `SamplingConfig.beam_width_array`."""
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
    typical_p: float = 1.0
    """Of what the filters above keep, keep the tokens whose information is closest to the expected one until their mass
    reaches p, as transformers' TypicalLogitsWarper (locally typical sampling, Meister et al. 2022); 1 keeps all."""
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
    beam_width_array: list[int] = []
    """How many beams go on after each step, each at most `beam_width`; the last entry holds for all later steps, as in
    TensorRT-LLM's variable-beam-width search. Empty = always `beam_width`, which stays the number of hypotheses."""
    beam_search_diversity_rate: float = 0.0
    """Of beam search, as in TensorRT-LLM: a continuation of the beam of rank r (0 is the best) is chosen as if its log
    probability were greater by r times this, which keeps continuations of the best beams from crowding out all others.
    Scores do not contain it. It is not the `diversity_penalty` of groups of beams."""
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

    @property
    def follows_each_token(self) -> bool:
        """Whether a row has state that every sampled token changes: no step can then sample several in a row."""
        return self.beam_width > 1 or self.top_p_decay < 1 or self.top_p_min > self.top_p

    def validate(self) -> None:
        """Raise InvalidRequest, with one sentence, if a value is out of its range."""
        checks = (
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"0 (greedy) or a finite number of at least {MIN_TEMPERATURE}",
            ),
            ("top_k", self.top_k, 0 <= self.top_k < 2**31, "between 0 (off) and 2147483647"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_p_decay", self.top_p_decay, 0.0 < self.top_p_decay <= 1.0, "above 0 and at most 1"),
            ("top_p_min", self.top_p_min, 0.0 < self.top_p_min <= 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("typical_p", self.typical_p, 0.0 < self.typical_p <= 1.0, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed <= MAX_SEED, "an unsigned 64-bit integer"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
                f"between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}",
            ),
            *(
                (name, value, abs(value) <= MAX_PENALTY, f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}")
                for name, value in (
                    ("presence_penalty", self.presence_penalty),
                    ("frequency_penalty", self.frequency_penalty),
                )
            ),
            ("min_tokens", self.min_tokens, self.min_tokens >= 0, ">= 0"),
            ("beam_width", self.beam_width, self.beam_width >= 1, ">= 1"),
            (
                "beam_width_array",
                self.beam_width_array,
                len(self.beam_width_array) <= MAX_BEAM_WIDTHS
                and all(1 <= width <= self.beam_width for width in self.beam_width_array),
                f"at most {MAX_BEAM_WIDTHS} numbers between 1 and beam_width {self.beam_width}",
            ),
            (
                "beam_search_diversity_rate",
                self.beam_search_diversity_rate,
                0 <= self.beam_search_diversity_rate <= MAX_DIVERSITY_RATE,
                f"between 0 and {MAX_DIVERSITY_RATE:g}",
            ),
            ("length_penalty", self.length_penalty, abs(self.length_penalty) <= 8, "between -8 and 8"),
            (
                "no_repeat_ngram_size",
                self.no_repeat_ngram_size,
                0 <= self.no_repeat_ngram_size <= MAX_NGRAM_SIZE,
                f"between 0 (off) and {MAX_NGRAM_SIZE}",
            ),
        )
        for name, value, holds, rule in checks:
            if not holds:
                raise InvalidRequest(f"{name} must be {rule}, got {str(value)[:80]}")
