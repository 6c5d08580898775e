"""A dialect is a table: which field each input tensor sets, and which value each output tensor holds.

All dialects share the code that reads a request and writes a chunk, so a new dialect is a new table in `dialects`.
Knows numpy arrays by name and :class:`ClientRequest`; nothing of pb_utils, tokens or the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from inflight.errors import InvalidRequest
from inflight.server.tensors.chunk import is_of_request
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.tensor_values import Array, ReadLimits, Value, read_scalar, stack, to_array

ANY_ONE = "one value"
"""Among the neutral values of an input: any, if it is the only one."""

Reader = Callable[[str, Array, ReadLimits], Value | None]
"""(tensor's name, array, limits) -> Python value, None = as if it were not given; raises InvalidRequest."""
Filler = Callable[[str, Array, ReadLimits], Mapping[str, Any]]
"""The same for a tensor that sets several fields of ClientRequest."""


MAX_PROMPTS = 64
"""Of one request to a dialect with a batch dimension that does not say another number: max_batch_size in config.pbtxt,
where an operator may change it."""


class TensorType(Enum):
    """A tritonserver data type: its name in config.pbtxt and the numpy type of its arrays."""

    BOOL = ("TYPE_BOOL", np.bool_)
    UINT8 = ("TYPE_UINT8", np.uint8)
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
    """One input. It sets `field`, or the fields that `fills` finds in it. Without both it is refused unless it is empty
    or its value is one of `neutral`."""

    name: str
    dtype: TensorType
    dims: tuple[int, ...]
    field: str = ""
    """Field of ClientRequest that the value is stored in."""
    read: Reader = read_scalar
    fills: Filler | None = None
    neutral: tuple[object, ...] | None = ()
    """Values without an effect, which are accepted, ANY_ONE among them for any single one; None = every value is
    ignored."""
    reason: str = ""
    """Why it is refused or ignored, or what to use instead."""

    @property
    def is_refused(self) -> bool:
        """Whether it has values that are refused because they ask for what no field says."""
        return not self.field and self.fills is None and self.neutral is not None

    def values(self, array: Array, limits: ReadLimits) -> Mapping[str, Any]:
        """The fields of ClientRequest that it sets. Raises InvalidRequest."""
        if self.fills is not None:
            return self.fills(self.name, array, limits)
        if self.field:
            value = self.read(self.name, array, limits)
            return {} if value is None else {self.field: value}
        if self.neutral is not None and array.size and not self._is_neutral(array, self.neutral):
            if self.reason:
                raise InvalidRequest(f"{self.name} is not supported: {self.reason}")
            raise InvalidRequest(f"{self.name} is not supported by this model: leave it out")
        return {}

    @staticmethod
    def _is_neutral(array: Array, neutral: tuple[object, ...]) -> bool:
        return array.size == 1 and (ANY_ONE in neutral or array.reshape(-1)[0] in neutral)


@dataclass(frozen=True, kw_only=True)
class OutputTensor:
    """One output: an attribute of Chunk. It is sent always or if a field of the request switches it on; and if the
    request names some of the outputs, it is sent exactly if it is among them."""

    name: str
    dtype: TensorType
    dims: tuple[int, ...]
    value: str
    """Attribute of Chunk, or behind a dot of one of its attributes; None there = it is not sent."""
    asked_by: str = ""
    """Field or property of ClientRequest that switches it on; empty = always on."""
    by_name: Mapping[str, Any] | None = None
    """Fields that a request sets by naming this output, unless it sets them itself; None = `asked_by` becomes true."""
    as_text: bool = False
    """Whether numbers are sent as text."""
    wire_rank: int | None = None
    """Dimensions of the array that is sent; None = those of `dims`, and the batch dimension."""

    @property
    def fields_by_name(self) -> Mapping[str, Any]:
        if self.by_name is not None:
            return self.by_name
        return {self.asked_by: True} if self.asked_by else {}

    def to_array(self, chunks: Sequence[object], batched: bool) -> Array | None:
        """The values of all `chunks` (Chunks, or what else has the attributes), one below the other, or the first one's
        if they are the whole request's; None if they have nothing of it."""
        array = self._of_one(chunks[0])
        if len(chunks) > 1 and not is_of_request(self.value):
            others = [self._of_one(chunk) for chunk in chunks[1:]]
            arrays = [each for each in (array, *others) if each is not None]
            array = stack(arrays) if arrays else None
        if array is None:
            return None
        rank = self.wire_rank or array.ndim + batched
        return array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)

    def _of_one(self, chunk: object) -> Array | None:
        value = chunk
        for name in self._path:
            value = None if value is None else getattr(value, name)
        if value is None:
            return None
        return to_array(str(value) if self.as_text else value, self.dtype.numpy_type, len(self.dims))

    @cached_property
    def _path(self) -> tuple[str, ...]:
        return tuple(self.value.split("."))


@dataclass(frozen=True, kw_only=True)
class Default:
    """What a dialect means by a request that does not set a field."""

    field: str
    value: object = None
    unless: tuple[str, ...] = ()
    """Other fields: the default does not hold if the request sets one of them."""
    like: str = ""
    """Another field, whose value is taken instead of `value` if the request sets it."""


class Gathering(Enum):
    """Which sequences of a request one response holds, one below the other."""

    NONE = enum.auto()
    """One: each sequence has responses of its own."""
    BEAMS = enum.auto()
    """All beams of a search; otherwise one."""
    ALL = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """All tensors of one Triton model."""

    name: str
    inputs: tuple[InputTensor, ...]
    outputs: tuple[OutputTensor, ...]
    required: tuple[tuple[str, ...], ...]
    """Groups of input names; a request that is no stop and no order must have exactly one of each group."""
    batched: bool = False
    """True: config.pbtxt has max_batch_size > 0, so every tensor has a leading dimension, the request's prompts."""
    max_prompts: int = MAX_PROMPTS
    """If it is batched."""
    unfinished: str = ""
    """The finish_reason of all chunks but the last."""
    defaults: tuple[Default, ...] = ()
    """In their order: a later one sees what an earlier one has set."""
    gathering: Gathering = Gathering.NONE
    repeats: tuple[str, ...] = ()
    """Values of Chunk that responses of a stream repeat. Of `text` and `log_probs` each one holds all so far, and not
    only what is new; `context_logits` are in the first and in the last one."""
    stops_unknown: bool = False
    """Whether a stop request succeeds although no request with its id is in flight."""
    stop_error: str = ""
    """Error message, with the code CANCELLED, that a stop request is answered with; "" = success."""
    no_echo_in_streams: str = ""
    """Error message for a stream that asks for its prompt to be repeated; "" = the prompt is left out."""
    uncoded: frozenset[str] = frozenset()
    """Codes of errors whose text is the sentence alone, because clients compare it with another server's."""
    cancellation_log: tuple[str, str] | None = None
    """What the log says before and after a request is cancelled whose client has disconnected; None = nothing."""
    has_vllm_metrics: bool = False
    """Whether its requests are counted under vLLM's names too."""
    parameters_as: str = ""
    """Input without which the request parameters are read instead, by `read_parameters`."""
    read_parameters: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Request parameters -> fields of ClientRequest. Ignores parameters that it does not know."""

    @cached_property
    def inputs_by_name(self) -> dict[str, InputTensor]:
        return {tensor.name: tensor for tensor in self.inputs}

    @cached_property
    def outputs_by_name(self) -> dict[str, OutputTensor]:
        return {tensor.name: tensor for tensor in self.outputs}

    def read(
        self, arrays: Mapping[str, Array], limits: ReadLimits, parameters: Mapping[str, Any] | None = None
    ) -> ClientRequest:
        """Input tensors, and request parameters in the place of one, -> ClientRequest. Raises InvalidRequest with one
        sentence."""
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, array in arrays.items():
            tensor = self.inputs_by_name.get(name)
            if tensor is None:
                raise InvalidRequest("the request holds an input tensor that this model does not have")
            for field, value in tensor.values(array, limits).items():
                if field in values and values[field] != value:
                    raise InvalidRequest(f"{origins[field]} and {name} set the same option: give one of them")
                values[field], origins[field] = value, name
        if parameters and self.read_parameters is not None and self.parameters_as not in arrays:
            values |= self.read_parameters(parameters)
        self._fill_in(values)
        client = ClientRequest(**values)
        if not (client.stop or client.lora_order):
            self._check_required(arrays)
        if self.no_echo_in_streams and client.stream and client.exclude_input_in_output is False:
            raise InvalidRequest(self.no_echo_in_streams)
        return client

    def offering(self, names: Collection[str]) -> Dialect:
        """The same with these outputs only: those that a model's config.pbtxt has."""
        return replace(self, outputs=tuple(tensor for tensor in self.outputs if tensor.name in names))

    def wanted(self, names: Collection[str]) -> frozenset[str] | None:
        """The outputs that a request wants which names these; None if it names none or every one: tritonserver names
        all outputs for a request that does not, as perf_analyzer does, which wants none in particular."""
        return None if not names or self.outputs_by_name.keys() <= set(names) else frozenset(names)

    def fields_for(self, wanted: frozenset[str] | None) -> dict[str, Any]:
        """Fields of ClientRequest that the wanted outputs need."""
        tensors = [self.outputs_by_name[name] for name in sorted(wanted or ()) if name in self.outputs_by_name]
        return {field: value for tensor in tensors for field, value in tensor.fields_by_name.items()}

    def gathers(self, client: ClientRequest) -> bool:
        """Whether each response to `client` holds all of its sequences."""
        return self.gathering is Gathering.ALL or (self.gathering is Gathering.BEAMS and (client.beam_width or 1) > 1)

    def write(self, chunks: Sequence[object], client: ClientRequest, wanted: frozenset[str] | None) -> dict[str, Array]:
        """Chunks of one sequence each -> output tensors by name. `wanted`: see the method."""
        if wanted is None:
            asked = [tensor for tensor in self._switched if getattr(client, tensor.asked_by)]
            sent = [*self._always, *asked]
        else:
            sent = [tensor for tensor in self.outputs if tensor.name in wanted]
        arrays = {tensor.name: tensor.to_array(chunks, self.batched) for tensor in sent}
        return {name: array for name, array in arrays.items() if array is not None}

    @cached_property
    def _always(self) -> tuple[OutputTensor, ...]:
        return tuple(tensor for tensor in self.outputs if not tensor.asked_by)

    @cached_property
    def _switched(self) -> tuple[OutputTensor, ...]:
        return tuple(tensor for tensor in self.outputs if tensor.asked_by)

    def _fill_in(self, values: dict[str, Any]) -> None:
        for default in self.defaults:
            if default.field not in values and values.keys().isdisjoint(default.unless):
                value = values.get(default.like) if default.like else default.value
                if value is not None:
                    values[default.field] = value

    def _check_required(self, arrays: Mapping[str, Array]) -> None:
        for group in self.required:
            given = [name for name in group if name in arrays]
            if len(given) > 1:
                raise InvalidRequest(f"{' and '.join(given)} exclude each other: give one of them")
            if not given:
                raise InvalidRequest(f"{' or '.join(group)} is required")
