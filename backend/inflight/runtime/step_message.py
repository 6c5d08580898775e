"""The results of a step as bytes: from the pipeline stage that samples to the others. Nothing is unpickled."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import torch
from torch import Tensor

from inflight.runtime.sampler import SampledTokens
from inflight.runtime.step_handle import StepResult
from inflight.runtime.step_tensors import StepTensors

DTYPES = {
    "bool": torch.bool,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}
"""Of a step's results."""


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Sampled(msgspec.Struct, frozen=True, array_like=True):
    """See SampledTokens."""

    token_ids: _Array
    log_probs: _Array | None
    is_finite: _Array
    faults: _Array | None


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """See StepResult."""

    sampled: _Sampled | None
    prompts: list[list[dict[str, _Array]]]
    samples: dict[str, _Array]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Message)


def encode_result(result: StepResult) -> bytes:
    """`result` is on the host. Drafts of a draft model are not in it: pipeline stages have none."""
    sampled = result.sampled
    message = _Message(
        sampled=None
        if sampled is None
        else _Sampled(
            token_ids=_encode(sampled.token_ids_S),
            log_probs=None if sampled.log_probs_S is None else _encode(sampled.log_probs_S),
            is_finite=_encode(sampled.is_finite_S),
            faults=None if sampled.faults_P is None else _encode(sampled.faults_P),
        ),
        prompts=[
            [{name: _encode(tensor) for name, tensor in piece.items()} for piece in pieces]
            for pieces in result.tensors.prompts
        ],
        samples={name: _encode(tensor) for name, tensor in result.tensors.samples.items()},
    )
    return _encoder.encode(message)


def decode_result(data: bytes | bytearray) -> StepResult:
    """The inverse of encode_result."""
    message = _decoder.decode(data)
    sampled = message.sampled
    return StepResult(
        sampled=None
        if sampled is None
        else SampledTokens(
            token_ids_S=_decode(sampled.token_ids),
            log_probs_S=None if sampled.log_probs is None else _decode(sampled.log_probs),
            is_finite_S=_decode(sampled.is_finite),
            faults_P=None if sampled.faults is None else _decode(sampled.faults),
        ),
        tensors=StepTensors(
            prompts=[
                [{name: _decode(array) for name, array in piece.items()} for piece in pieces]
                for pieces in message.prompts
            ],
            samples={name: _decode(array) for name, array in message.samples.items()},
        ),
    )


def received_result(message: Future[bytearray]) -> Future[StepResult]:
    """The result in a message that is still to come. Decoded on the thread that receives it."""
    result: Future[StepResult] = Future()

    def decode(received: Future[bytearray]) -> None:
        try:
            result.set_result(decode_result(received.result()))
        except Exception as error:
            result.set_exception(error)

    message.add_done_callback(decode)
    return result


def _encode(tensor: Tensor) -> _Array:
    return _Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numpy().tobytes())


def _decode(array: _Array) -> Tensor:
    # Of no elements, torch makes no tensor from a buffer.
    if 0 in array.shape:
        return torch.empty(array.shape, dtype=DTYPES[array.dtype])
    return torch.frombuffer(bytearray(array.data), dtype=DTYPES[array.dtype]).view(array.shape)
