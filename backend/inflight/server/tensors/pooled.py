"""The dialects of `embedding` and `rerank`: texts to vectors, and to scores, in plain tensors.

Their tensors have the names that NVIDIA's NeMo Retriever NIMs give them over the same protocol, and so have the request
parameters. An output is an attribute of Embedded or of Ranked.

Formats: https://docs.nvidia.com/nim/nemo-retriever/text-embedding/latest/reference-grpc.html and
https://docs.nvidia.com/nim/nemo-retriever/text-reranking/latest/reference-grpc.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequest
from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.entries import output, row, scalar
from inflight.server.tensors.tensor_values import MAX_TEXTS, Array, read_passages

FLOAT = "float"
PREFIXES = "put what the checkpoint wants before a query or a passage into the text itself"


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
    if "input_type" in parameters:
        raise InvalidRequest(f"input_type is not supported: {PREFIXES}")
    if parameters.get("embedding_type", FLOAT) != FLOAT:
        raise InvalidRequest(f"embedding_type must be {FLOAT}: vectors are float32 here")
    values = read_truncate(parameters)
    if "dimensions" in parameters:
        dimensions = parameters["dimensions"]
        if not isinstance(dimensions, int) or isinstance(dimensions, bool):
            raise InvalidRequest("dimensions must be a whole number")
        values["dimensions"] = dimensions
    return values


def read_truncate(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequest."""
    if "truncate" not in parameters:
        return {}
    if not isinstance(parameters["truncate"], str):
        raise InvalidRequest("truncate must be text")
    return {"truncate": parameters["truncate"]}


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
    inputs=(_text("text"), scalar("dimensions", TensorType.INT32), TRUNCATE),
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
    read_parameters=read_truncate,
)
