"""tritonserver's `pb_utils`, as far as the backend uses it, in plain Python.

It fails where the real one crashes: if two threads touch a metric object, if a response is sent after the final one, or
if `is_cancelled` is called after the final response. It also fails if anything is used, created or deleted after a test
has declared that `finalize` has returned.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Life:
    """The lifetime of the stub that this module stands for."""

    is_over: ClassVar[bool] = False
    """finalize() has returned."""
    misuse: ClassVar[list[str]] = []


def touch(what: str) -> None:
    """Called whenever something of this module is used."""
    if Life.is_over:
        Life.misuse.append(f"{what} by {threading.current_thread().name}")


class TritonModelException(Exception):
    pass


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        touch("an error was made")
        super().__init__(message)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(array, np.ndarray)
        touch("a tensor was made")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        touch("a response was made")
        self.tensors, self._error = output_tensors or [], error

    def error(self) -> TritonError | None:
        return self._error

    def __getitem__(self, name: str) -> Any:
        """An output's value: text as str, numbers as nested lists."""
        array = next(tensor.as_numpy() for tensor in self.tensors if tensor.name() == name)
        return array.reshape(-1)[0].decode() if array.dtype == object else array.tolist()

    def names(self) -> list[str]:
        return [tensor.name() for tensor in self.tensors]


class ResponseSender:
    """Keeps what was sent; `finished` is set by the final response."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.num_finals = 0
        self.client_left = False
        self.raises: Exception | None = None
        self.finished = threading.Event()
        self.misuse: list[str] = []

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        touch("a response was sent")
        if self.num_finals:
            self.misuse.append("sent after the final response")
            raise RuntimeError("Response sender has been closed")
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.num_finals += 1
        if response is not None:
            self.responses.append(response)
        if self.num_finals:
            self.finished.set()
        if self.raises is not None:
            raise self.raises

    def is_cancelled(self) -> bool:
        touch("a cancellation was asked for")
        if self.num_finals:
            self.misuse.append("asked after the final response")
        return self.client_left

    @property
    def error(self) -> TritonError | None:
        return self.responses[-1].error() if self.responses else None

    @property
    def text(self) -> str:
        return "".join(response["text_output"] for response in self.responses if response.error() is None)


@dataclass
class InferenceRequest:
    """A request as tritonserver would pass it; its tensors are built by `request`."""

    tensors: list[Tensor]
    sender: ResponseSender
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameter_json: str = "{}"
    timeout_us: int = 0

    def inputs(self) -> list[Tensor]:
        return self.tensors

    def request_id(self) -> str:
        return self.id

    def requested_output_names(self) -> list[str]:
        return list(self.outputs)

    def parameters(self) -> str:
        return self.parameter_json

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> ResponseSender:
        return self.sender


class Metric:
    def __init__(self, family: MetricFamily, labels: dict[str, str], buckets: list[float] | None) -> None:
        self.family, self.labels, self.buckets = family, labels, buckets
        self.value, self.observed = 0.0, []
        self._thread = threading.get_ident()

    def _check(self) -> None:
        touch("a metric was used")
        if threading.get_ident() != self._thread:
            MetricFamily.misuse.append(f"{self.family.name} touched by two threads")

    def set(self, value: float) -> None:
        self._check()
        self.value = value

    def increment(self, value: float) -> None:
        self._check()
        assert value >= 0
        self.value += value

    def observe(self, value: float) -> None:
        self._check()
        assert self.buckets
        self.observed.append(value)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    metrics: ClassVar[dict[tuple[str, str], Metric]] = {}
    """(family, value of its own label) -> the metric made last."""
    misuse: ClassVar[list[str]] = []

    def __init__(self, name: str, description: str, kind: str) -> None:
        touch("a metric family was made")
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        touch("a metric was made")
        own = [value for key, value in labels.items() if key not in ("model", "version", "pid")]
        metric = Metric(self, labels, buckets)
        MetricFamily.metrics[self.name, own[0] if own else ""] = metric
        return metric


unloaded: list[str] = []


def unload_model(model_name: str) -> None:
    touch("a model was unloaded")
    unloaded.append(model_name)


_NUMPY_TYPES = {bool: np.bool_, int: np.int32, float: np.float32}


def request(
    inputs: dict[str, Any], *, request_id: str = "", outputs: tuple[str, ...] = (), parameters: str = "{}"
) -> InferenceRequest:
    """A request from plain values: text, bytes, numbers, or lists of them; arrays go as they are."""
    tensors = [Tensor(name, _array(name, value)) for name, value in inputs.items()]
    return InferenceRequest(tensors, ResponseSender(), request_id, outputs, parameters)


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    if name in ("seed", "lora_task_id"):
        return np.array(values, dtype=np.uint64)
    if values and isinstance(values[0], str | bytes):
        return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)
    return np.array(values, dtype=_NUMPY_TYPES[type(values[0])] if values else np.int32)
