"""The metadata of a GGUF file: values by key, each checked when it is asked for. Knows no key."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from inflight.errors import ConfigurationError

Value = int | float | bool | str | tuple[Any, ...]
"""A list has values of one type."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Metadata:
    """A value of another type than it is asked for, or one that is missing and has no default, is a ConfigurationError
    that names file and key."""

    path: Path
    values: dict[str, Value]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def keys_below(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`."""
        return (key for key in self.values if key.startswith(prefix))

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._find(key, default)
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def whole_of_all(self, key: str, default: int | None = None) -> int:
        """Likewise, or a list of equal numbers, one for each layer, with 0 for a layer that has none."""
        value = self._find(key, default)
        if type(value) is tuple and len(found := set(value) - {0} or {0}) == 1:
            (value,) = found
        if type(value) is tuple:
            raise ConfigurationError(f"{self.path}: {key} differs between layers, which is not supported")
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def of_layers(self, key: str, num_layers: int) -> tuple[int, ...]:
        """A whole number for each layer, or one for all."""
        value = self._find(key, None)
        values = value if type(value) is tuple else (value,) * num_layers
        if len(values) != num_layers or not all(type(each) is int for each in values):
            raise self._wrong(key, f"a whole number, or one for each of {num_layers} layers", value)
        return values

    def number(self, key: str, default: float | None = None) -> float:
        value = self._find(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, "a number", value)
        return float(value)

    def scalar(self, key: str) -> int | float | bool:
        value = self._find(key, None)
        if type(value) not in (int, float, bool) or not math.isfinite(value):
            raise self._wrong(key, "a number, or true or false", value)
        found: int | float | bool = value
        return found

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._find(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._find(key, default)
        if type(value) is not str:
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return self._list(key, str, "texts")

    def wholes(self, key: str) -> tuple[int, ...]:
        return self._list(key, int, "whole numbers")

    def numbers(self, key: str) -> tuple[float, ...]:
        return self._list(key, float, "numbers")

    def _list(self, key: str, kind: type[_T], words: str) -> tuple[_T, ...]:
        value = self._find(key, None)
        if type(value) is not tuple or not all(type(each) is kind for each in value):
            raise self._wrong(key, f"a list of {words}", value)
        return value

    def _find(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise ConfigurationError(f"{self.path} has no {key} in its metadata")
        return value

    def _wrong(self, key: str, words: str, value: object) -> ConfigurationError:
        return ConfigurationError(f"{self.path}: {key} must be {words}, got {reprlib.repr(value)}")
