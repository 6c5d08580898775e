"""What one step gave a fake device to do, in order; and what of it a CUDA graph would freeze.

Knows tensors and operations, no step and no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

LAUNCH, OPERATION, COLLECTIVE, TO_DEVICE, TO_HOST = "triton", "torch", "collective", "to_device", "to_host"
KINDS = (LAUNCH, OPERATION, COLLECTIVE, TO_DEVICE, TO_HOST)
"""Of events. One operation of torch counts as one, although some are several kernels of CUDA."""


class Storages:
    """Gives each tensor's memory a number, in the order in which the memory was first seen in this process: caches of
    the kernels, which know tensors by their addresses, outlive a device."""

    end = 0
    """All numbers so far are below this."""

    def __init__(self) -> None:
        # A weak reference keeps the key from being used again.
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}

    def number(self, tensor: Tensor) -> int:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._known:
            self._known[reference.cdata] = (Storages.end, reference)
            Storages.end += 1
        return self._known[reference.cdata][0]

    def address(self, tensor: Tensor) -> int:
        """As torch's allocator would choose it: a multiple of 512 for a tensor at the start of its memory."""
        return (1 + self.number(tensor)) * 2**34 + tensor.storage_offset() * tensor.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    """One of KINDS."""
    name: str
    """Of the kernel or operation; a copy's type and number of bytes."""
    arguments: dict[str, Any]
    """By name or place: numbers and constants as they are, a tensor as its Trace describes it."""


@dataclass(slots=True)
class Trace:
    storages: Storages
    num_before: int = field(init=False)
    """Memory that existed before the step has a number below this."""
    events: list[Event] = field(default_factory=list)
    _made: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_before = Storages.end

    def add(self, kind: str, name: str, arguments: dict[str, Any]) -> None:
        described = {key: self._describe(value) for key, value in arguments.items()}
        self.events.append(Event(kind, name, described))

    def counts(self) -> dict[str, int]:
        """Number of events by kind, for all KINDS."""
        found = Counter(event.kind for event in self.events)
        return {kind: found[kind] for kind in KINDS}

    def names(self, kind: str) -> Counter[str]:
        """How often each kernel was launched, or operation called."""
        return Counter(event.name for event in self.events if event.kind == kind)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            number = self.storages.number(value)
            # A graph's own memory has the same addresses at every replay, so what the step makes is told by its order.
            place = (
                ("kept", number)
                if number < self.num_before
                else ("made", self._made.setdefault(number, len(self._made)))
            )
            return (str(value.dtype), tuple(value.shape), value.stride(), *place, value.storage_offset())
        if isinstance(value, list | tuple):
            return tuple(self._describe(each) for each in value)
        return value if isinstance(value, int | float | str | None) else str(value)


def differences(first: Trace, second: Trace) -> set[str]:
    """What differs between two steps that one CUDA graph is to replay, in words; empty = nothing.

    Compared are the order of kernels, operations and copies, and of each its grid, numbers, constants, shapes, strides
    and the addresses of device memory that lives longer than a step. Of host memory only the sizes are: it may be
    another one in each step, as long as the copies are no part of the graph.
    """
    own, other = ([event.name for event in trace.events] for trace in (first, second))
    if own != other:
        return {f"other work: {sorted((Counter(own) - Counter(other)) + (Counter(other) - Counter(own)))}"}
    return {text for pair in zip(first.events, second.events, strict=True) for text in _differing(*pair)}


def _differing(first: Event, second: Event) -> Iterator[str]:
    for name in first.arguments.keys() | second.arguments.keys():
        before, after = first.arguments.get(name), second.arguments.get(name)
        if before != after:
            yield f"{first.name}.{name}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 6 and value[3] in ("kept", "made"):
        dtype, shape, stride, kind, number, offset = value
        return f"{dtype.removeprefix('torch.')}{list(shape)} strides {list(stride)} {kind} {number}+{offset}"
    return str(value)


@cache
def is_one_view(operation: torch._ops.OpOverload) -> bool:
    """Whether it returns one view of its only tensor."""
    schema = operation._schema
    tensors = [each for each in schema.arguments if "Tensor" in str(each.type)]
    return is_view(operation) and len(schema.returns) == len(tensors) == 1 and str(schema.returns[0].type) == "Tensor"


@cache
def is_view(operation: torch._ops.OpOverload) -> bool:
    """Whether it returns its argument's memory and writes nothing, so that it launches nothing."""
    returned = [each.alias_info for each in operation._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
