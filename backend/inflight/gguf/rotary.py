"""The rotary embedding of a GGUF file as a config.json has it. Scalings that the engine lacks are refused by name.

llama.cpp writes Llama 3's scaling as one factor for each pair of a head's elements, and not the numbers that they were
computed from. Those that Llama 3 was published with are tried. Of Gemma 4 such factors say which pairs are rotated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from inflight.errors import ConfigurationError
from inflight.gguf.architecture import Architecture
from inflight.gguf.file import GgufFile
from inflight.gguf.tensor_types import F32

FACTORS = "rope_freqs.weight"
"""Tensor with a divisor for each frequency."""
UNSUPPORTED_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
LOW, HIGH = 1.0, 4.0
ORIGINAL_LENGTHS = (8192, 4096, 16384)
"""Context that a model was trained for before scaling: that of Llama 3, and of others with its scaling."""
TOLERANCE = 1e-4
ENDLESS = 1e29
"""What divides a frequency by more rotates nothing: llama.cpp writes 1e30."""
SUPPORTED_KEYS = (
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
)
LATENT_KEYS = ("rope.scaling.yarn_log_multiplier",)
"""Those of attention to latents beside them."""
"""Below the architecture's name."""


def rope_parameters(file: GgufFile, architecture: Architecture, prefix: str, rotary_dim: int) -> dict[str, Any]:
    """`prefix`: of the metadata's keys; `rotary_dim`: elements of a head that are rotated. Raises
    ConfigurationError."""
    full = {**_of_all(file, f"{prefix}.rope", rotary_dim), **architecture.rope_values}
    if architecture.attends_to_latents and full["rope_type"] == "yarn":
        # A tenth of what the scale of scores is made of. In published models both are equal.
        factor = 10 * file.metadata.number(f"{prefix}.rope.scaling.yarn_log_multiplier")
        full |= {"mscale": factor, "mscale_all_dim": factor}
    key, windows = f"{prefix}.rope.freq_base_swa", architecture.windows
    theta = full["rope_theta"]
    if windows is None or not windows.own_rope:
        if file.metadata.number(key, theta) != theta:
            raise ConfigurationError(f"{file.path}: {key} must be {prefix}.rope.freq_base ({theta:g})")
        return full
    of_windows = file.metadata.number(key, theta if windows.theta is None else windows.theta)
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": of_windows}}


def _of_all(file: GgufFile, prefix: str, rotary_dim: int) -> dict[str, Any]:
    """Of layers without a window of their own."""
    metadata = file.metadata
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number(f"{prefix}.freq_base", 10000.0)}
    for name in UNSUPPORTED_FACTORS:
        if name in file.tensors:
            raise ConfigurationError(
                f"{file.path}: the scaling of positions by the tensor {name} (longrope) is not supported; use the "
                "file of a model for a shorter context"
            )
    kind = metadata.text(f"{prefix}.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigurationError(f"{file.path}: {prefix}.scaling.type {kind!r} is not supported; linear and yarn are")
    if FACTORS in file.tensors:
        if kind == "yarn":
            raise ConfigurationError(
                f"{file.path}: {prefix}.scaling.type {kind} and the tensor {FACTORS} scale positions twice, which is "
                "not supported"
            )
        return {**parameters, **_by_factors(file, parameters["rope_theta"], rotary_dim)}
    factor = metadata.number(f"{prefix}.scaling.factor", metadata.number(f"{prefix}.scale_linear", 1.0))
    if kind == "yarn":
        return {**parameters, "rope_type": "yarn", "factor": factor, **_yarn(file, prefix, factor)}
    if kind == "linear" and factor not in (0.0, 1.0):
        return {**parameters, "rope_type": "linear", "factor": factor}
    return parameters


def _yarn(file: GgufFile, prefix: str, factor: float) -> dict[str, Any]:
    metadata = file.metadata
    # What YaRN multiplies queries and keys with. The first key is a factor of it in some files.
    natural = 0.1 * math.log(max(factor, 1.0)) + 1.0
    accepted = {"attn_factor": (1.0, natural), "yarn_attn_factor": (natural,), "yarn_ext_factor": (1.0,)}
    for key, values in accepted.items():
        name = f"{prefix}.scaling.{key}"
        if not any(math.isclose(metadata.number(name, value), value, rel_tol=TOLERANCE) for value in values):
            expected = " or ".join(f"{value:g}" for value in values)
            raise ConfigurationError(f"{file.path}: {name} other than {expected} is not supported")
    return {
        "original_max_position_embeddings": metadata.whole(f"{prefix}.scaling.original_context_length"),
        "beta_fast": metadata.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
    }


def _by_factors(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any]:
    info = file.tensors[FACTORS]
    if info.type is not F32 or info.shape != (rotary_dim // 2,):
        raise ConfigurationError(
            f"{file.path}: tensor {FACTORS} is {info.type.name} of shape {list(info.shape)}, and {rotary_dim // 2} "
            "numbers of F32 are expected"
        )
    factors = struct.unpack(f"<{rotary_dim // 2}f", file.bytes_of(info))
    num_rotated = sum(factor == 1.0 for factor in factors)
    if all(factor == 1.0 if pair < num_rotated else factor > ENDLESS for pair, factor in enumerate(factors)):
        return {"rope_type": "proportional", "partial_rotary_factor": 2 * num_rotated / rotary_dim}
    largest = max(factors)
    for original in ORIGINAL_LENGTHS:
        expected = _factors(theta, rotary_dim, largest, original)
        if all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }
    raise ConfigurationError(
        f"{file.path}: the factors in tensor {FACTORS} are neither those of Llama 3's scaling of positions nor of a "
        "rotation of some pairs alone, and others are not supported"
    )


def _factors(theta: float, rotary_dim: int, factor: float, original: int) -> Sequence[float]:
    """What Llama 3 divides each frequency by."""
    found = []
    for element in range(0, rotary_dim, 2):
        turns = original * theta ** (-element / rotary_dim) / (2 * math.pi)
        blend = min(max((turns - LOW) / (HIGH - LOW), 0.0), 1.0)
        found.append(1 / ((1 - blend) / factor + blend))
    return found
