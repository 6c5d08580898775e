"""A dialect is a table: which field each input tensor sets, and which value each output tensor holds.

All dialects share the code that reads a request and writes a chunk, so a new dialect is a new table in `dialects`.
Knows numpy arrays by name and :class:`ClientRequest`; nothing of pb_utils, tokens or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from inflight.errors import InvalidRequest
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.tensor_values import Array, ReadLimits, Value, read_scalar, to_array

Reader = Callable[[str, Array, ReadLimits], Value]
"""(tensor's name, array, limits) -> Python value; raises InvalidRequest."""


class TensorType(Enum):
    """A tritonserver data type: its name in config.pbtxt and the numpy type of its arrays."""

    BOOL = ("TYPE_BOOL", np.bool_)
    INT32 = ("TYPE_INT32", np.int32)
    UINT32 = ("TYPE_UINT32", np.uint32)
    INT64 = ("TYPE_INT64", np.int64)
    UINT64 = ("TYPE_UINT64", np.uint64)
    FP16 = ("TYPE_FP16", np.float16)
    FP32 = ("TYPE_FP32", np.float32)
    STRING = ("TYPE_STRING", np.object_)

    @property
    def config_name(self) -> str:
        name: str = self.value[0]
        return name

    @property
    def numpy_type(self) -> type:
        numpy_type: type = self.value[1]
        return numpy_type


@dataclass(frozen=True, kw_only=True)
class InputTensor:
    """One input. It sets `field` if it has one; otherwise it is refused unless its value is one of `neutral`."""

    name: str
    dtype: TensorType
    dims: tuple[int, ...]
    field: str = ""
    """Field of ClientRequest that the value is stored in; "" = not supported."""
    read: Reader = read_scalar
    neutral: tuple[Value, ...] | None = ()
    """Values without an effect, which are accepted; None = every value is ignored."""


@dataclass(frozen=True, kw_only=True)
class OutputTensor:
    """One output: an attribute of Chunk, sent always or only if the request asks for it."""

    name: str
    dtype: TensorType
    dims: tuple[int, ...]
    value: str
    """Attribute of Chunk, or behind a dot of one of its attributes."""
    asked_by: str = ""
    """Boolean field of ClientRequest that switches it on; empty = always on."""

    def to_array(self, chunk: Chunk, batched: bool) -> Array | None:
        """None if the chunk has nothing of it."""
        value: object = chunk
        for name in self.value.split("."):
            value = None if value is None else getattr(value, name)
        return None if value is None else to_array(value, self.dtype.numpy_type, len(self.dims) + batched)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """All tensors of one Triton model."""

    name: str
    inputs: tuple[InputTensor, ...]
    outputs: tuple[OutputTensor, ...]
    required: tuple[tuple[str, ...], ...]
    """Groups of input names; a request that is no stop and no order must have exactly one of each group."""
    batched: bool = False
    """True: config.pbtxt has max_batch_size > 0, so every tensor carries a leading dimension of 1."""
    unfinished: str = ""
    """The finish_reason of all chunks but the last."""
    forced: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ClientRequest that have the same value in every request of this dialect unless a tensor sets them."""

    @cached_property
    def inputs_by_name(self) -> dict[str, InputTensor]:
        return {tensor.name: tensor for tensor in self.inputs}

    def read(self, arrays: Mapping[str, Array], limits: ReadLimits) -> ClientRequest:
        """Input tensors -> ClientRequest. Raises InvalidRequest with one sentence."""
        values: dict[str, Any] = dict(self.forced)
        for name, array in arrays.items():
            tensor = self.inputs_by_name.get(name)
            if tensor is None:
                raise InvalidRequest("the request holds an input tensor that this model does not have")
            if tensor.field:
                values[tensor.field] = tensor.read(name, array, limits)
            elif tensor.neutral is not None and tensor.read(name, array, limits) not in tensor.neutral:
                raise InvalidRequest(f"{name} is not supported by this model: leave it out")
        client = ClientRequest(**values)
        if not (client.stop or client.lora_order):
            self._check_required(arrays)
        return client

    def write(self, chunk: Chunk, client: ClientRequest, requested: frozenset[str] | None) -> dict[str, Array]:
        """Chunk -> output tensors by name. `requested`: names of the outputs to write; None = all that the request's
        flags switch on."""
        arrays = {
            tensor.name: tensor.to_array(chunk, self.batched)
            for tensor in self.outputs
            if (requested is None or tensor.name in requested)
            and (not tensor.asked_by or getattr(client, tensor.asked_by))
        }
        return {name: array for name, array in arrays.items() if array is not None}

    def _check_required(self, arrays: Mapping[str, Array]) -> None:
        for group in self.required:
            given = [name for name in group if name in arrays]
            if len(given) > 1:
                raise InvalidRequest(f"{' and '.join(given)} exclude each other: give one of them")
            if not given:
                raise InvalidRequest(f"{' or '.join(group)} is required")
