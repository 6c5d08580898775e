"""How a client wants tokens chosen, before the checkpoint's defaults."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The names and ranges are those of SamplingConfig. None always means that the client does not say."""

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
    no_repeat_ngram_size: int | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    beam_width_array: list[int] | None = None
    beam_search_diversity_rate: float | None = None
    logit_bias: dict[int, float] | None = None
    embedding_bias: bytes | None = None
    is_random: bool = False
    """Whether tokens are sampled, with temperature 1, where neither client nor checkpoint say how."""
