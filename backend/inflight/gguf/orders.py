"""Orders of rows and columns in which llama.cpp keeps a tensor and transformers does not. Knows no tensor's bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inflight.errors import ConfigurationError
from inflight.gguf.metadata import Metadata

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Order:
    """Rows, or columns, as an array of `shape` in the file, and with its axes in another order in transformers."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    before: int = 0
    """So many before them are in the same order in both."""

    @property
    def size(self) -> int:
        return self.before + math.prod(self.shape)

    @property
    def unit(self) -> int:
        """Elements that stay beside each other, those before them too."""
        inner = self.shape[-1] if self.axes[-1] == len(self.axes) - 1 else 1
        return math.gcd(inner, self.before)

    def places(self) -> NDArray[np.int64]:
        """In the file, of each in transformers' order."""
        import numpy as np  # which who only asks what a file is does without

        moved = np.arange(math.prod(self.shape)).reshape(self.shape).transpose(self.axes).flatten()
        return np.concatenate([np.arange(self.before), moved + self.before])


OrderOf = Callable[[Metadata, str], Order]
"""Of a file with this metadata, whose keys have this prefix. Raises ConfigurationError."""


def turned_queries(metadata: Metadata, prefix: str) -> Order:
    """The halves of a head, which are rotated with each other, alternate in the file."""
    return _turned(metadata, prefix, _num_heads(metadata, prefix))


def turned_keys(metadata: Metadata, prefix: str) -> Order:
    return _turned(metadata, prefix, heads_of(metadata, prefix)[1])


def heads_with_all(metadata: Metadata, prefix: str) -> Order:
    """Queries, keys and values in one matrix: the file has the queries of all heads first."""
    num_heads, width = _num_heads(metadata, prefix), metadata.whole(f"{prefix}.embedding_length")
    return Order((3, num_heads, width // max(num_heads, 1)), (1, 0, 2))


def value_heads(metadata: Metadata, prefix: str) -> Order:
    """Of a DeltaNet: the file has the first of each key head, then the second of each."""
    return _by_key_heads(metadata, prefix, _quotient(metadata, prefix, "inner_size", "time_step_rank"))


def value_heads_behind_keys(metadata: Metadata, prefix: str) -> Order:
    """The same behind queries and keys."""
    values = value_heads(metadata, prefix)
    whole = metadata.whole
    return Order(values.shape, values.axes, 2 * whole(f"{prefix}.ssm.group_count") * whole(f"{prefix}.ssm.state_size"))


def numbers_of_value_heads(metadata: Metadata, prefix: str) -> Order:
    """The same of one number a head."""
    return _by_key_heads(metadata, prefix, 1)


def sections_by_key_heads(metadata: Metadata, prefix: str) -> Order:
    """Two numbers of each value head: the file has both of a key head's, one behind the other."""
    num_key_heads = metadata.whole(f"{prefix}.ssm.group_count")
    return Order((num_key_heads, 2, _quotient(metadata, prefix, "time_step_rank", "group_count")), (1, 0, 2))


def _by_key_heads(metadata: Metadata, prefix: str, size: int) -> Order:
    num_key_heads = metadata.whole(f"{prefix}.ssm.group_count")
    return Order((_quotient(metadata, prefix, "time_step_rank", "group_count"), num_key_heads, size), (1, 0, 2))


def heads_of(metadata: Metadata, prefix: str) -> tuple[int, int]:
    """How many there are of queries, and of keys."""
    num_heads = _num_heads(metadata, prefix)
    return num_heads, metadata.whole_of_all(f"{prefix}.attention.head_count_kv", num_heads)


def _turned(metadata: Metadata, prefix: str, num_heads: int) -> Order:
    key, width = f"{prefix}.attention.key_length", metadata.whole(f"{prefix}.embedding_length")
    head_dim = metadata.whole(key, width // max(_num_heads(metadata, prefix), 1))
    if head_dim % 2:
        raise ConfigurationError(f"{metadata.path}: a head of {head_dim} elements has no halves to rotate")
    return Order((num_heads, head_dim // 2, 2), (0, 2, 1))


def _num_heads(metadata: Metadata, prefix: str) -> int:
    return metadata.whole_of_all(f"{prefix}.attention.head_count")


def _quotient(metadata: Metadata, prefix: str, dividend: str, divisor: str) -> int:
    sizes = [metadata.whole(f"{prefix}.ssm.{name}") for name in (dividend, divisor)]
    if min(sizes) < 1 or sizes[0] % sizes[1]:
        raise ConfigurationError(
            f"{metadata.path}: {prefix}.ssm.{divisor} ({sizes[1]}) must divide {prefix}.ssm.{dividend} ({sizes[0]})"
        )
    return sizes[0] // sizes[1]
