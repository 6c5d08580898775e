"""One gRPC stream to the model `llm` or another, tensors in and tensors out, without our client.

    with RawStream(server.grpc_url) as stream:
        answer = stream.ask({"text_input": "Once", "max_tokens": 8})

A stream carries many requests at once; `send` starts one and `collect` waits for all that were started.
"""

from __future__ import annotations

import itertools
import queue
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from inflight.server.tensors.dialects import LLM

DEADLINE = 180.0
"""Seconds without any response after which a request counts as hung."""

_TYPES = {tensor.name: "BYTES" if tensor.dtype.name == "STRING" else tensor.dtype.name for tensor in LLM.inputs}
_NUMPY = {"BYTES": np.object_, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_, "INT32": np.int32}


@dataclass
class Answer:
    """All responses to one request, in order."""

    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    """Output tensors by name; empty for a response without any."""
    error: str = ""
    num_finals: int = 0

    @property
    def pieces(self) -> list[str]:
        return [response["text_output"][0].decode() for response in self.responses if "text_output" in response]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token for response in self.responses for token in response["output_ids"][0].tolist()]

    @property
    def finish_reason(self) -> str:
        return str(self.responses[-1]["finish_reason"][0].decode())


class RawStream:
    """Requests without an id of their own get one, so that responses find their way."""

    _numbers = itertools.count()

    def __init__(self, url: str) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._answers: dict[str, Answer] = {}
        self._client.start_stream(lambda result, error: self._results.put((result, error)))

    def __enter__(self) -> RawStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, cancel: bool = True) -> None:
        """Cancels only what is unanswered: tritonserver may keep a request for ever whose final response meets a
        cancel, and with it the model when it is unloaded."""
        is_answered = all(answer.num_finals for answer in self._answers.values())
        self._client.stop_stream(cancel_requests=cancel and not is_answered)
        self._client.close()

    def send(
        self,
        inputs: dict[str, Any],
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        model: str = "llm",
        **more: Any,
    ) -> Answer:
        """Start a request. If it has the id of an open request of this stream, both share its Answer. Tensors of other
        models than `llm` are arrays."""
        request_id = request_id or f"raw-{next(self._numbers)}"
        answer = self._answers.get(request_id)
        if answer is None or answer.num_finals:
            answer = self._answers[request_id] = Answer()
        self._client.async_stream_infer(
            model,
            tensors(inputs),
            request_id=request_id,
            outputs=[grpcclient.InferRequestedOutput(name) for name in outputs] or None,
            enable_empty_final_response=True,
            **more,
        )
        return answer

    def ask(self, inputs: dict[str, Any], **more: Any) -> Answer:
        return self.collect(self.send(inputs, **more))

    def ask_in_parts(self, inputs: dict[str, Any], **more: Any) -> Answer:
        """Ask a request that streams until its answer comes in several responses. A server whose sender is behind puts
        all tokens that it has of a sequence into one."""
        deadline = time.monotonic() + DEADLINE
        while len((answer := self.ask(inputs, **more)).responses) < 2:
            assert not answer.error, answer.error
            assert time.monotonic() < deadline, "each answer came in one response: nothing streams"
        return answer

    def collect(self, *answers: Answer, finals: int = 1) -> Answer:
        """Wait until each has had its final response; the first of them."""
        while any(answer.num_finals < finals for answer in answers):
            self.take()
        return answers[0]

    def take(self) -> None:
        """Wait for one response of any request."""
        result, error = self._results.get(timeout=DEADLINE)
        if error is not None:
            self._take_error(error)
            return
        response = result.get_response()
        answer = self._answers[response.id]
        answer.num_finals += response.parameters["triton_final_response"].bool_param
        if response.outputs:
            answer.responses.append({output.name: result.as_numpy(output.name) for output in response.outputs})

    def _take_error(self, error: Exception) -> None:
        """The wire's error carries no request id: it is taken to belong to the request that was sent last."""
        answer = [answer for answer in self._answers.values() if not answer.num_finals][-1]
        answer.error = str(error)
        answer.num_finals += 1


def tensors(inputs: dict[str, Any]) -> list[grpcclient.InferInput]:
    """Input tensors for tritonclient over gRPC."""
    return [_tensor(name, value) for name, value in inputs.items()]


def as_array(name: str, value: Any) -> np.ndarray:
    """The array of an input of `llm`."""
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    kind = _TYPES.get(name, "INT32")
    raw = [item.encode() if isinstance(item, str) else item for item in values] if kind == "BYTES" else values
    return np.array(raw, dtype=_NUMPY[kind])


def _tensor(name: str, value: Any) -> grpcclient.InferInput:
    array = as_array(name, value)
    tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor
