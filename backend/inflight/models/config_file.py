"""Reads a checkpoint's config.json and checks each value that the decoder uses, one by one.

transformers checks types too, but no ranges, not every key, and not in every version. Knows the allowed values of each
key; :mod:`.config` checks combinations of values.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigurationError
from inflight_kernels import Activation

logger = logging.getLogger(__name__)

MODELOPT_FILE = "hf_quant_config.json"
"""Older checkpoints of ModelOpt say only there that they are quantised."""
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 2**16
MIN_SCALE, MAX_SCALE = 1e-6, 1e9
"""Upper bounds: far above the values of any checkpoint, far below those at which arithmetic overflows."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition on a value: `holds` tests it, `words` describes it in the error message."""

    words: str
    holds: Callable[[Any], bool]
    may_be_null: bool = False


def _whole(smallest: int, largest: int = MAX_SIZE, *, may_be_null: bool = False) -> Rule:
    words = f"a whole number from {smallest} to {largest}"
    return Rule(words, lambda value: type(value) is int and smallest <= value <= largest, may_be_null)


def _number(words: str, holds: Callable[[float], bool], *, may_be_null: bool = False) -> Rule:
    def is_number(value: Any) -> bool:
        return type(value) in (int, float) and math.isfinite(value) and holds(value)

    return Rule(f"a number {words}", is_number, may_be_null)


def _positive(*, may_be_null: bool = False) -> Rule:
    return _number(
        f"from {MIN_SCALE} to {MAX_SCALE:.0f}", lambda value: MIN_SCALE <= value <= MAX_SCALE, may_be_null=may_be_null
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_list_of_whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_SIZE for item in value)


_THETA = _number(f"above 1 and at most {MAX_SIZE}", lambda value: 1 < value <= MAX_SIZE, may_be_null=True)
_NOT_NEGATIVE = _number(f"from 0 to {MAX_SCALE:.0f}", lambda value: 0 <= value <= MAX_SCALE, may_be_null=True)
_FLAG = Rule("true or false", lambda value: isinstance(value, bool), True)
_TEXT = Rule("a string", lambda value: isinstance(value, str), True)
_TEXTS = Rule("a list of strings", _is_list_of_strings, True)
_WHOLE_NUMBERS = Rule("a list of whole numbers", _is_list_of_whole_numbers, True)
_OBJECT = Rule("an object", _is_object, True)
_OBJECTS = Rule(
    "an object of objects", lambda value: isinstance(value, dict) and all(map(_is_object, value.values())), True
)

RULES: dict[str, Rule] = {
    "architectures": _TEXTS,
    "vocab_size": _whole(1),
    "hidden_size": _whole(1),
    "intermediate_size": _whole(1),
    "num_hidden_layers": _whole(1, MAX_LAYERS),
    "num_attention_heads": _whole(1),
    "num_key_value_heads": _whole(1, may_be_null=True),
    "head_dim": _whole(1, may_be_null=True),
    "max_position_embeddings": _whole(1),
    "rms_norm_eps": _number("from 0 to 1", lambda value: 0 <= value <= 1),
    "sliding_window": _whole(0, may_be_null=True),
    "max_window_layers": _whole(0, may_be_null=True),
    "layer_types": _TEXTS,
    "use_sliding_window": _FLAG,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "hidden_act": _TEXT,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "quantization_config": _OBJECT,
    "rope_theta": _THETA,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "partial_rotary_factor": _positive(may_be_null=True),
    "per_layer_config": _OBJECTS,
}
"""Rules for the top-level keys. For a missing key, transformers' default applies."""

TOLD_DEFAULTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "rope_theta",
    "hidden_act",
    "tie_word_embeddings",
    "num_experts_per_tok",
    "norm_topk_prob",
)
"""Keys that the log names if the file leaves them out: of another value the tokens would be others, and no tensor's
shape would show it, or not that of every one."""

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}
"""As transformers calls them."""

ROPE_RULES: dict[str, Rule] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _THETA,
    "factor": _positive(may_be_null=True),
    "original_max_position_embeddings": _whole(1, may_be_null=True),
    "partial_rotary_factor": _positive(may_be_null=True),
    "attention_factor": _positive(may_be_null=True),
    "low_freq_factor": _positive(may_be_null=True),
    "high_freq_factor": _positive(may_be_null=True),
    "beta_fast": _positive(may_be_null=True),
    "beta_slow": _positive(may_be_null=True),
    "mscale": _NOT_NEGATIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "truncate": _FLAG,
}
"""Rules for the keys of `rope_parameters` and `rope_scaling`."""


class NotNative(ConfigurationError):
    """The checkpoint is valid, but needs something that the native decoder does not support."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """Typed access to options of a config.json, with the defaults of transformers filled in.

    A value of another type or out of range is a ConfigurationError that names the file and the key.
    """

    path: Path
    values: Mapping[str, Any]

    def flag(self, key: str) -> bool:
        """True or false; false if the key is missing."""
        return bool(self._checked(key, _FLAG) or False)

    def scale(self, key: str) -> float:
        """A positive factor; 1 if the key is missing."""
        value = self._checked(key, _positive())
        return 1.0 if value is None else float(value)

    def scales(self, key: str, count: int) -> list[float]:
        """So many positive factors; all 1 if the key is missing or null."""
        values = self.values.get(key)
        if values is None:
            return [1.0] * count
        if not isinstance(values, list) or len(values) != count:
            raise self.fault(f"{key} must be {count} numbers, got {reprlib.repr(values)}")
        for value in values:
            _check(self.path, "", {key: _positive()}, {key: value})
        return [float(value) for value in values]

    def eps(self, key: str) -> float:
        """What a norm adds to the mean square."""
        value = self._checked(key, RULES["rms_norm_eps"])
        if value is None:
            raise ConfigurationError(f"{self.path} has no {key}")
        return float(value)

    def activation(self, key: str) -> Activation:
        """Of a feed-forward; SiLU if the key is missing. Raises NotNative for one that the engine does not have."""
        name = self._checked(key, _TEXT)
        name = "silu" if name is None else name
        if name in ACTIVATIONS:
            return ACTIVATIONS[name]
        from transformers.activations import ACT2FN  # takes seconds to import

        if name not in ACT2FN:
            raise ConfigurationError(f"{self.path}: {key} {name!r} is not the name of an activation in transformers")
        raise NotNative(f"{self.path}: {key} {name!r} is not supported; these are: {', '.join(ACTIVATIONS)}")

    def whole(self, *spellings: str, largest: int = MAX_SIZE) -> int:
        """A number from 1 to `largest`, by the first of its names that is there; ConfigurationError without any."""
        key = next((key for key in spellings if key in self.values), spellings[0])
        value = self._checked(key, _whole(1, largest))
        if value is None:
            raise ConfigurationError(f"{self.path} has no {' or '.join(spellings)}")
        return int(value)

    def optional_whole(self, key: str) -> int | None:
        """A number from 1; None if the key is missing or null."""
        value = self._checked(key, _whole(1, may_be_null=True))
        return None if value is None else int(value)

    def count(self, *spellings: str) -> int:
        """A number from 0, by the first of its names that is there; 0 without any."""
        key = next((key for key in spellings if key in self.values), spellings[0])
        return int(self._checked(key, _whole(0, may_be_null=True)) or 0)

    def whole_numbers(self, key: str) -> frozenset[int]:
        """Numbers from 0; none if the key is missing."""
        return frozenset(self.whole_list(key))

    def whole_list(self, key: str) -> list[int]:
        """The same in their order."""
        return list(self._checked(key, _WHOLE_NUMBERS) or ())

    def texts(self, key: str) -> list[str]:
        """None if the key is missing."""
        return list(self._checked(key, _TEXTS) or ())

    def head_dim(self) -> int:
        """Elements of an attention head."""
        given = self.optional_whole("head_dim")
        return self.whole("hidden_size") // self.whole("num_attention_heads") if given is None else given

    def num_labels(self) -> int:
        """Of a network that scores texts."""
        return len(self._checked("id2label", _OBJECT) or {}) or 1

    def text(self, key: str, *allowed: str) -> str:
        """One of `allowed`, the first of them if the key is missing. Raises ConfigurationError for another."""
        value = self._checked(key, _TEXT)
        if value is None:
            return allowed[0]
        if value not in allowed:
            raise self.fault(f"{key} must be {' or '.join(allowed)}, got {reprlib.repr(value)}")
        return str(value)

    def fault(self, reason: str) -> ConfigurationError:
        """What to raise for options that contradict each other."""
        return ConfigurationError(f"{self.path}: {reason}")

    def soft_cap(self, key: str) -> float:
        """A positive number; 0 if the key is missing."""
        return float(self._checked(key, _positive(may_be_null=True)) or 0.0)

    def not_native(self, key: str, *supported: str) -> NotNative:
        """What to raise for a value of `key` that only transformers computes."""
        return NotNative(f"{self.path}: {key} {self.values[key]!r} is not supported; only {', '.join(supported)} is")

    def _checked(self, key: str, rule: Rule) -> Any:
        _check(self.path, "", {key: rule}, self.values)
        return self.values.get(key)


def read_config_file(path: Path) -> dict[str, Any]:
    """The unchecked values in `path`, a config.json. Raises ConfigurationError if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path.parent} is not a Hugging Face checkpoint folder: it has no config.json"
        ) from None
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return values


def tell_defaults(path: Path, given: Mapping[str, Any], completed: Mapping[str, Any]) -> None:
    """Log what the file at `path`, which holds `given`, leaves out of what decides tokens, and what transformers has in
    its place."""
    said, has = ({**values, **_rope_of(values)} for values in (given, completed))
    filled = {key: has[key] for key in TOLD_DEFAULTS if key not in said and has.get(key) is not None}
    if filled:
        told = ", ".join(f"{key} {json.dumps(value, default=str)}" for key, value in filled.items())
        logger.info("%s leaves out what transformers' defaults stand for: %s", path, told)


def _rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta stands in one of these, too."""
    found = (values.get(key) for key in ("rope_scaling", "rope_parameters"))
    return {key: value for each in found if isinstance(each, Mapping) for key, value in each.items()}


def read_quantization(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """`quantization_config` of the config.json at `path`, which holds `values`, or what ModelOpt wrote to a file beside
    it, with the `quant_method` modelopt; empty if there is neither. Raises ConfigurationError if either is no object.
    """
    check_values(path, values, ["quantization_config"])
    if values.get("quantization_config"):
        return dict(values["quantization_config"])
    beside = path.with_name(MODELOPT_FILE)
    if not beside.exists():
        return {}
    quantization = read_config_file(beside).get("quantization")
    if not isinstance(quantization, dict):
        raise ConfigurationError(f"{beside}: quantization must be an object, got {reprlib.repr(quantization)}")
    return {"quant_method": "modelopt", **quantization}


def check_values(path: Path, values: Mapping[str, Any], keys: Iterable[str] = ()) -> None:
    """Check `values`, or only its `keys` if some are given. Raises ConfigurationError naming the file, the key and its
    rule for a value that breaks the rule."""
    chosen = {key: RULES[key] for key in keys} or RULES
    _check(path, "", chosen, values)
    for name in {"rope_scaling", "rope_parameters"} & chosen.keys():
        parameters = values.get(name) or {}
        _check(path, f"{name}.", ROPE_RULES, parameters)
        for kind, of_kind in by_layer_type(parameters).items():
            _check(path, f"{name}.{kind}.", ROPE_RULES, of_kind)


def by_layer_type(rope_parameters: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rotary parameters that only layers of one type have, by the name of the type."""
    return {kind: value for kind, value in rope_parameters.items() if isinstance(value, Mapping)}


def _check(path: Path, prefix: str, rules: Mapping[str, Rule], values: Mapping[str, Any]) -> None:
    for key, rule in rules.items():
        if key not in values or (values[key] is None and rule.may_be_null):
            continue
        if not rule.holds(values[key]):
            raise ConfigurationError(f"{path}: {prefix}{key} must be {rule.words}, got {reprlib.repr(values[key])}")
