"""The `quantization_config` of a compressed-tensors checkpoint. Knows no tensors.

Of the many schemes that it can describe, these are computed. Weights of fp8 with a scale for each output, each block or
one for all, and activations that are quantised to fp8 when they are multiplied: each token with a scale of its own, or
each group of its features, or all with one that the checkpoint brings. Whole numbers of 4 or 8 bits, whose activations
stay as they are or are quantised to int8, each token with a scale of its own, and MXFP4, whose activations stay. And
scales for an fp8 KV cache. Every field that says otherwise is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from inflight.errors import ConfigurationError

Supported = Mapping[str, tuple[object, ...]]
"""Fields of a tensor's description, and the values that are supported."""
FP8: Supported = {"type": ("float",), "num_bits": (8,), "symmetric": (True,)}
WEIGHTS: Supported = {**FP8, "dynamic": (False,), "strategy": ("channel", "tensor", "block")}
INPUTS: Supported = {**FP8, "dynamic": (True, False)}
INPUT_STRATEGY = {True: "token", False: "tensor"}
"""By `dynamic`. One scale that is computed of all tokens would make a token depend on the others of its step."""
CACHE: Supported = {**FP8, "dynamic": (False,), "strategy": ("tensor",)}
DEFAULTS = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False}
"""What the format means by a missing field."""
FORMATS = ("float-quantized", "naive-quantized")
"""Older checkpoints have the second, which stores fp8 weights in the same way."""
PACKED_FORMATS = ("pack-quantized", "int-quantized")
MXFP4_FORMAT = "mxfp4-pack-quantized"
GROUP_UNIT = 32
PACKED: Supported = {"type": ("int",), "num_bits": (4, 8), "dynamic": (False,), "strategy": ("channel", "group")}
PACKED_INPUTS: Supported = {"type": ("int",), "num_bits": (8,), "symmetric": (True,), "dynamic": (True,)}
"""Of W8A8 and W4A8."""
ORDERS = (None, "static", "weight", "group")
"""Of activations, by which weights were quantised."""
STATUSES = ("compressed", "frozen")
"""Older checkpoints have the second, with the same tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """Which scales a checkpoint brings for each product of fp8."""

    has_scale_per_output: bool
    """Of the weight; else it has one."""
    has_input_scale: bool
    """One for all tokens; else each token is quantised with a scale of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Blocks:
    """fp8 with a scale for each block of so many outputs and inputs."""

    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedScheme:
    """Whole numbers."""

    bits: int
    group_size: int
    """Inputs that share a scale; 0 = all of an output."""
    is_symmetric: bool
    is_packed: bool
    """In words of 32 bits."""
    has_int8_inputs: bool
    """Activations are quantised as well, each token by itself."""
    is_reordered: bool
    """Groups are of inputs with similar activations, and not of neighbours."""


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """It leaves nothing open."""


Scheme = Fp8Scheme | Fp8Blocks | PackedScheme | Mxfp4Scheme


def read_scheme(path: Path, quantization: Mapping[str, Any]) -> Scheme | None:
    """The scheme of the weights; None if they are not quantised, but the KV cache is.

    `quantization`: of the config.json at `path`. Raises ConfigurationError unless it describes what is supported.
    """
    fields = _Fields(path, "quantization_config", quantization)
    has_cache = bool(quantization.get("kv_cache_scheme"))
    if has_cache:
        fields.part("kv_cache_scheme").check_all(CACHE)
    if has_cache and not quantization.get("config_groups"):
        return None
    fields.check("format", (*FORMATS, *PACKED_FORMATS, MXFP4_FORMAT))
    fields.check("quantization_status", STATUSES, "compressed")
    fields.check_empty("transform_config")
    if quantization.get("sparsity_config"):
        fields.part("sparsity_config").check("format", ("dense",))
    groups = fields.part("config_groups")
    if len(groups.values) != 1:
        raise ConfigurationError(
            f"{path}: {groups.name} must hold one group, got {len(groups.values)}: layers that are quantised in "
            "different ways are not supported"
        )
    group = groups.part(next(iter(groups.values)))
    group.check("format", (quantization.get("format"), None), None)
    group.check_empty("output_activations")
    stored = quantization.get("format")
    if stored in PACKED_FORMATS:
        return _read_packed(path, group, is_packed=stored == "pack-quantized")
    if stored == MXFP4_FORMAT:
        group.part("weights").check_all({"type": ("float",), "num_bits": (4,), "group_size": (32,)})
        group.check_empty("input_activations")
        return Mxfp4Scheme()
    return _read_fp8(path, group)


def _read_fp8(path: Path, group: _Fields) -> Fp8Scheme | Fp8Blocks:
    weights, inputs = group.part("weights"), group.part("input_activations")
    weights.check_all(WEIGHTS)
    if weights.values.get("strategy") == "block":
        inputs.check_all({**FP8, "dynamic": (True,), "strategy": ("group",)})
        blocks = read_blocks(path, f"{weights.name}.block_structure", weights.values.get("block_structure"))
        inputs.check("group_size", (blocks.inputs,))
        return blocks
    inputs.check_all(INPUTS)
    is_dynamic = bool(inputs.values.get("dynamic", DEFAULTS["dynamic"]))
    inputs.check("strategy", (INPUT_STRATEGY[is_dynamic],))
    return Fp8Scheme(has_scale_per_output=weights.values.get("strategy") == "channel", has_input_scale=not is_dynamic)


def read_blocks(path: Path, name: str, blocks: Any) -> Fp8Blocks:
    """`blocks`: the value of `name`, a field of the config.json at `path`. Raises ConfigurationError."""
    match blocks:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0 and inputs % GROUP_UNIT == 0:
            return Fp8Blocks(outputs=outputs, inputs=inputs)
    raise ConfigurationError(
        f"{path}: {name} must be two numbers, the second one a multiple of {GROUP_UNIT}, got {json.dumps(blocks)}"
    )


def _read_packed(path: Path, group: _Fields, *, is_packed: bool) -> PackedScheme:
    weights = group.part("weights")
    weights.check_all(PACKED)
    weights.check("actorder", ORDERS)
    has_inputs = bool(group.values.get("input_activations"))
    if has_inputs:
        inputs = group.part("input_activations")
        inputs.check_all(PACKED_INPUTS)
        inputs.check("strategy", ("token",))
    bits = int(weights.values.get("num_bits", DEFAULTS["num_bits"]))
    size: Any = weights.values.get("group_size") if weights.values["strategy"] == "group" else 0
    if type(size) is not int or size < 0 or size % GROUP_UNIT or (size == 0 and weights.values["strategy"] == "group"):
        raise ConfigurationError(
            f"{path}: {weights.name}.group_size must be a multiple of {GROUP_UNIT}, got {json.dumps(size)}"
        )
    if not is_packed:
        weights.check("num_bits", (8,), DEFAULTS["num_bits"])
    return PackedScheme(
        bits=bits,
        group_size=size,
        is_symmetric=bool(weights.values.get("symmetric", DEFAULTS["symmetric"])),
        is_packed=is_packed,
        has_int8_inputs=has_inputs,
        is_reordered=weights.values.get("actorder") == "group" and size > 0,
    )


class _Fields:
    """An object within config.json, and its place there."""

    def __init__(self, path: Path, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values
        self._path = path

    def part(self, key: str) -> _Fields:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            self._refuse(key, "an object", value)
        return _Fields(self._path, f"{self.name}.{key}", value)

    def check_all(self, supported: Supported) -> None:
        for key, values in supported.items():
            self.check(key, values, DEFAULTS.get(key))

    def check(self, key: str, supported: tuple[object, ...], default: object = None) -> None:
        value = self.values.get(key, default)
        if value not in supported:
            self._refuse(key, " or ".join(map(json.dumps, supported)), value)

    def check_empty(self, key: str) -> None:
        if value := self.values.get(key):
            self._refuse(key, "null", value)

    def _refuse(self, key: str, supported: str, value: object) -> NoReturn:
        raise ConfigurationError(
            f"{self._path}: {self.name}.{key} must be {supported}, got {json.dumps(value)}: of compressed-tensors "
            "checkpoints only those with fp8 weights, activations quantised by token or with one static scale (as "
            "llm-compressor's schemes FP8_DYNAMIC and FP8 make them), with whole numbers of 4 or 8 bits (W4A16, W8A16, "
            "W8A8) or MXFP4, and at most one scale of the KV cache for the keys and one for the values of a layer are "
            "supported"
        )
