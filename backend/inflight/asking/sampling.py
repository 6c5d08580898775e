"""How the tokens of an answer are chosen. None always means that the client does not say: the checkpoint decides."""

from __future__ import annotations

import msgspec
import numpy as np

from inflight.asking.refusal import Refusal
from inflight.generation_defaults import GenerationDefaults
from inflight.sampling_config import MAX_BIAS, SamplingConfig


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The names and ranges are those of SamplingConfig."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[int, float] = {}
    bad_words: list[str] = []
    """Texts that must not occur, at the start of a text and after a space alike."""
    allowed_token_ids: list[int] | None = None
    """No others are sampled."""
    is_random: bool = False
    """Whether tokens are sampled, with temperature 1, where neither client nor checkpoint say how."""

    def embedding_bias(self, vocab_size: int) -> bytes:
        """Biases that leave no other token than the allowed ones; b"" if all are. Raises Refusal."""
        allowed = self.allowed_token_ids
        if allowed is None:
            return b""
        if not allowed or not all(0 <= token < vocab_size for token in allowed):
            last = vocab_size - 1
            raise Refusal("allowed_token_ids", "{0} must hold token ids from 0 to {last}, at least one", last=last)
        bias = np.full(vocab_size, -MAX_BIAS, dtype="<f4")
        bias[allowed] = 0.0
        return bias.tobytes()

    def config(
        self, defaults: GenerationDefaults, *, num_prompt_tokens: int, max_tokens: int, embedding_bias: bytes
    ) -> SamplingConfig:
        """With the checkpoint's defaults. Raises InvalidRequest; ranges are left to RequestLimits."""
        temperature = self.temperature
        if temperature is None and self.is_random:
            temperature = 1.0 if defaults.temperature is None else defaults.temperature
        return defaults.sampling_config(
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            logit_bias=self.logit_bias,
            embedding_bias=embedding_bias,
        )
