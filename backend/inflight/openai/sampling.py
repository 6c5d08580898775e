"""How a body wants tokens chosen, with the checkpoint's defaults, as OpenAI and vLLM have them.

Unlike at tritonserver, a body that says nothing is sampled: with the temperature of generation_config.json, else 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import structs

from inflight.generation_defaults import GenerationDefaults
from inflight.openai.api_error import APIError, invalid
from inflight.openai.fields import Body
from inflight.sampling_config import MAX_BIAS, SamplingConfig

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_PRIORITY = 2**20
"""Up to here each priority of a request has one of its own on the engine's scale."""
NONE_OF_TOP_K = (-1, 0)


@dataclass(frozen=True, slots=True)
class Biases:
    """The fields of SamplingConfig that all prompts of a body share."""

    logit_bias: dict[int, float]
    embedding_bias: bytes


def read_biases(body: Body, vocab_size: int) -> Biases:
    """Raises APIError."""
    return Biases(_logit_bias(body), _allowed_alone(body, vocab_size))


def sampling_config(
    body: Body, defaults: GenerationDefaults, biases: Biases, num_prompt_tokens: int, max_tokens: int
) -> SamplingConfig:
    """Raises APIError or InvalidRequest; ranges that the engine checks for all clients are left to it."""
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise invalid(f"top_p must be above 0 and at most 1, got {body.top_p}", "top_p")
    if body.seed is not None and not MIN_SEED <= body.seed <= MAX_SEED:
        raise invalid("seed must be a 64-bit integer", "seed")
    temperature = defaults.temperature if body.temperature is None else body.temperature
    config = defaults.sampling_config(
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_k=0 if body.top_k in NONE_OF_TOP_K else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed % 2**64,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        min_tokens=body.min_tokens,
    )
    return structs.replace(config, logit_bias=biases.logit_bias, embedding_bias=biases.embedding_bias)


def engine_priority(priority: int | None) -> float:
    """vLLM's priorities are integers, and lower ones go first; the engine's are from 0 to 1, and higher ones do."""
    if priority is None:
        return 0.5
    if abs(priority) > MAX_PRIORITY:
        raise invalid(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {priority}", "priority")
    return 0.5 - 0.5 * priority / (1 + abs(priority))


def _logit_bias(body: Body) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise invalid("the keys of logit_bias must be token ids", "logit_bias") from None


def _allowed_alone(body: Body, vocab_size: int) -> bytes:
    """Biases that leave no other token than the allowed ones; b"" if all are."""
    allowed = body.allowed_token_ids
    if allowed is None:
        return b""
    if not allowed or not all(0 <= token < vocab_size for token in allowed):
        raise _no_such_tokens("allowed_token_ids", vocab_size)
    bias = np.full(vocab_size, -MAX_BIAS, dtype="<f4")
    bias[allowed] = 0.0
    return bias.tobytes()


def _no_such_tokens(name: str, vocab_size: int) -> APIError:
    return invalid(f"{name} must hold token ids from 0 to {vocab_size - 1}, at least one", name)
