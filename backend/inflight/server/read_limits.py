"""The sizes that a model's tensors may have, by its configuration, its engine's limits and its tokenizer."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.request_limits import RequestLimits
from inflight.server.resume_token import max_bytes
from inflight.server.tensors.tensor_values import ReadLimits
from inflight.text.tokenizer import Tokenizer


def read_limits(config: EngineConfig, limits: RequestLimits, tokenizer: Tokenizer) -> ReadLimits:
    return ReadLimits(
        max_text_bytes=config.max_text_bytes,
        max_input_len=limits.max_input_len,
        vocab_size=limits.vocab_size,
        max_bytes_per_token=tokenizer.max_bytes_per_token,
        max_prompt_embedding_bytes=limits.max_prompt_embedding_bytes,
        max_resume_token_bytes=max_bytes(limits),
    )
