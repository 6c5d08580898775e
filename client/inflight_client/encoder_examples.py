"""Calls that a model answers which writes no text: an encoder, of which vectors or scores of texts are asked."""

from __future__ import annotations

import json
from typing import Any

TEXT, QUESTION, DOCUMENTS = "a red animal", "What is a fox?", ["a red animal", "a ship"]
OF_OPENAI: dict[str, tuple[str, dict[str, Any]]] = {
    "vectors": ("/v1/embeddings", {"input": TEXT}),
    "scores": ("/rerank", {"query": QUESTION, "documents": DOCUMENTS}),
}
"""What the model gives of a text -> the path of the OpenAI server that asks for it, and the body but for the model."""
OF_API: dict[str, tuple[str, dict[str, list[str]]]] = {
    "vectors": ("embedding", {"text": [TEXT]}),
    "scores": ("rerank", {"query": [QUESTION], "passage": DOCUMENTS}),
}
"""The same of tritonserver's models of --api embedding, and their tensors."""
OF_ENGINE = {"text_input": TEXT, "max_tokens": 0, "additional_outputs": "hidden_states", "gather_context": True}
"""What the engine's own model there answers, whatever the model gives: a vector for each token."""


def of_openai(address: str, model: str, pooled: str, *, has_keys: bool) -> str:
    """A command for an OpenAI server. `pooled`: what the model gives of a text, "vectors" or "scores"."""
    path, body = OF_OPENAI[pooled]
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    return _curl(f"{address}{path} -H 'Content-Type: application/json'{key}", {"model": model, **body})


def of_tritonserver(address: str, model: str, pooled: str, *, has_api: bool) -> str:
    """A command for tritonserver's HTTP. `model`: the engine's own. `has_api`: whether it has those of --api
    embedding."""
    if not has_api:
        return _curl(f"{address}/v2/models/{model}/generate", OF_ENGINE)
    name, tensors = OF_API[pooled]
    inputs = [
        {"name": each, "datatype": "BYTES", "shape": [1, len(texts)], "data": texts} for each, texts in tensors.items()
    ]
    return _curl(f"{address}/v2/models/{name}/infer", {"inputs": inputs})


def _curl(where: str, body: dict[str, Any]) -> str:
    return f"  curl http://{where} \\\n       -d '{json.dumps(body)}'"
