"""The configurations that are compared: every combination of the values of some parameters of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from inflight_client._exceptions import UsageError

POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
AXES = ("max_batch_size", "max_num_tokens", "batch_scheduler_policy", "tokens_per_block")
"""The engine's parameters whose values are compared."""
FIXED = {"enable_kv_cache_reuse": "false"}
"""Parameters of every variant. Measurements of a variant repeat their prompts, which a cache would serve."""
MAX_VARIANTS = 64
MAX_LEVELS = 16

Variant = dict[str, str]
"""Parameter -> value; one for each of AXES."""


def make_variants(values: Mapping[str, str]) -> list[Variant]:
    """Every combination of the values of AXES, which are comma-separated. Raises UsageError."""
    lists = [[(name, value) for value in _values(name, values[name])] for name in AXES]
    variants = [dict(combination) for combination in itertools.product(*lists)]
    if len(variants) > MAX_VARIANTS:
        raise UsageError(f"these are {len(variants)} combinations; at most {MAX_VARIANTS} are compared in one run")
    return variants


def is_configured(variant: Variant, parameters: Mapping[str, str]) -> bool:
    """Whether an engine with these parameters is this variant."""
    return all(parameters.get(key, "").lower() == value for key, value in (FIXED | variant).items())


def differing(variants: Sequence[Variant]) -> list[str]:
    """The parameters that have several values."""
    return [name for name in variants[0] if len({variant[name] for variant in variants}) > 1]


def parse_levels(text: str) -> list[int]:
    """Numbers of concurrent requests: "1,8,32". Raises UsageError."""
    levels = [int(_number("concurrency", part)) for part in _parts("concurrency", text)]
    if len(levels) > MAX_LEVELS:
        raise UsageError(f"concurrency {text!r} has {len(levels)} levels; at most {MAX_LEVELS} are measured")
    return levels


def _values(name: str, text: str) -> list[str]:
    parts = _parts(name, text)
    if name == "batch_scheduler_policy":
        for part in parts:
            if part not in POLICIES:
                raise UsageError(f"{name} has no {part!r}: there are {', '.join(POLICIES)}")
        return parts
    values = [_number(name, part) for part in parts]
    for value in values:
        if name == "tokens_per_block" and int(value) & (int(value) - 1):
            raise UsageError(f"{name} must be a power of two, got {value}")
    return values


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if "" in parts or len(set(parts)) < len(parts):
        raise UsageError(f"{name} takes different values with commas between them, got {text!r}")
    return parts


def _number(name: str, text: str) -> str:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"{name} takes whole numbers above 0, got {text!r}")
    return str(int(text))
