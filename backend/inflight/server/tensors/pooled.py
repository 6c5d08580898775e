"""The dialects of `embedding` and `rerank`: texts to vectors, and to scores, in plain tensors.

Their tensors have the names that NVIDIA's NeMo Retriever NIMs give them over the same protocol, and so have the request
parameters. An output is an attribute of Embedded or of Ranked.

Formats: https://docs.nvidia.com/nim/nemo-retriever/text-embedding/latest/reference-grpc.html and
https://docs.nvidia.com/nim/nemo-retriever/text-reranking/latest/reference-grpc.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequest
from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.entries import output, row, scalar
from inflight.server.tensors.tensor_values import MAX_TEXTS, Array, read_passages

FLOAT = "float"
TEXTS = ("truncate", "prompt_name", "input_type")
"""Request parameters that are inputs, too, and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """What `embedding` answers of one text."""

    embeddings: Array
    """(features,) float32, of the length 1."""
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """What `rerank` answers of one row."""

    scores: list[float]
    """Of each passage."""
    logit: list[float]
    """The same as the network gives them."""
    token_count: int
    """Of everything that the row has had computed."""


def read_embedding_parameters(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises InvalidRequest."""
    if parameters.get("embedding_type", FLOAT) != FLOAT:
        raise InvalidRequest(f"embedding_type must be {FLOAT}: vectors are float32 here")
    values = _texts(parameters, TEXTS)
    if "dimensions" in parameters:
        dimensions = parameters["dimensions"]
        if not isinstance(dimensions, int) or isinstance(dimensions, bool):
            raise InvalidRequest("dimensions must be a whole number")
        values["dimensions"] = dimensions
    return values


def read_rerank_parameters(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises InvalidRequest."""
    return _texts(parameters, ("truncate",))


def _texts(parameters: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    given = {name: parameters[name] for name in names if name in parameters}
    for name, value in given.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} must be text")
    return given


def _text(name: str) -> InputTensor:
    return scalar(name, TensorType.STRING, "text")


TRUNCATE = scalar("truncate", TensorType.STRING)
TOKEN_COUNT = OutputTensor(name="token_count", dtype=TensorType.INT32, dims=(1,), value="token_count", wire_rank=1)
"""One for each row, without a dimension of its own."""

EMBEDDING = Dialect(
    name="embedding",
    batched=True,
    max_prompts=MAX_TEXTS,
    required=(("text",),),
    inputs=(
        _text("text"),
        scalar("dimensions", TensorType.INT32),
        TRUNCATE,
        scalar("prompt_name", TensorType.STRING),
        scalar("input_type", TensorType.STRING),
    ),
    outputs=(output("embeddings", TensorType.FP32, 1, "embeddings"), TOKEN_COUNT),
    read_parameters=read_embedding_parameters,
)
RERANK = Dialect(
    name="rerank",
    batched=True,
    max_prompts=MAX_TEXTS,
    required=(("query",), ("passage",)),
    inputs=(_text("query"), row("passage", TensorType.STRING, read_passages, "passages"), TRUNCATE),
    outputs=(
        output("scores", TensorType.FP32, 1, "scores"),
        output("logit", TensorType.FP32, 1, "logit"),
        TOKEN_COUNT,
    ),
    read_parameters=read_rerank_parameters,
)
