"""What the clients ask: every kind of request of `request_kinds.py` as tensors, and the same engine through the other
doors. Each item is the same request every time, so that its answer is known."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from request_kinds import KINDS, RequestKind

from ci.chaos.answer import Answer
from ci.chaos.doors import Arrived, ask_client, ask_generate_stream, ask_grpc, ask_openai
from inflight.supervisor.options import Endpoints

APIS = ("tensorrtllm", "vllm")
MODELS = ("llm", "ensemble", "tensorrt_llm", "vllm_model")
"""Models that are asked, and whose stubs may die."""
LENGTH = 80
"""Tokens of most requests: long enough to be in flight when something happens."""
SHAPED = frozenset(
    {"guided decoding of tags in free text", "guided decoding, forced text, prompt lookup and draft tokens"}
)
"""Kinds that end by themselves."""
LARGE = frozenset({"context and generation logits", "hidden states"})
"""Kinds whose tensors are large; they stay short."""

PROMPT = "Once upon a time there was a little dog"
STORY = "Tell a story of a fox and a dog."


class Front(Enum):
    """A process at whose end the streams of its clients end, however well the engine is."""

    TRITONSERVER = "tritonserver"
    OPENAI = "the OpenAI server"


@dataclass(frozen=True)
class Item:
    """One request, as its client sends it."""

    name: str
    front: Front
    model: str
    """That tritonserver serves it by; "" at the OpenAI server."""
    url: Callable[[Endpoints], str]
    door: Callable[..., Awaitable[Answer]]
    """A function of `doors`, with all but address and callback."""

    async def ask(self, endpoints: Endpoints, arrived: Arrived) -> Answer:
        return await self.door(self.url(endpoints), arrived)


def workload() -> list[Item]:
    kinds = [kind for kind in KINDS if "tensors" not in kind.exceptions]
    return [*map(_kind, kinds), *_dialects(), *_by_client(), *_over_http(), *_openai()]


def _kind(kind: RequestKind) -> Item:
    inputs = {**kind.inputs(), "stream": True}
    if kind.feature not in SHAPED | LARGE:
        inputs["max_tokens"] = LENGTH
    return _grpc(f"llm: {kind.feature}", tensors=inputs, is_revised="beam_width" in kind.tensors)


def _grpc(name: str, *, model: str = "llm", **request: Any) -> Item:
    door = partial(ask_grpc, model=model, **request)
    return Item(name, Front.TRITONSERVER, model, lambda endpoints: endpoints.grpc, door)


def _dialects() -> list[Item]:
    parameters = {"max_tokens": LENGTH, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    vllm = {
        "text_input": np.array([PROMPT.encode()], object),
        "stream": np.array([True]),
        "exclude_input_in_output": np.array([True]),
        "sampling_parameters": np.array([json.dumps(parameters).encode()], object),
    }
    text = {
        "text_input": np.array([[PROMPT.encode()]], object),
        "max_tokens": np.array([[LENGTH]], np.int32),
        "temperature": np.array([[0.9]], np.float32),
        "random_seed": np.array([[8]], np.uint64),
        "stream": np.array([[True]]),
    }
    ids = {
        "input_ids": np.array([[1, 5, 9, 300]], np.int32),
        "input_lengths": np.array([[4]], np.int32),
        "request_output_len": np.array([[LENGTH]], np.int32),
        "streaming": np.array([[True]]),
        "exclude_input_in_output": np.array([[True]]),
    }
    return [
        _grpc("vllm_model", model="vllm_model", tensors=vllm, outputs=("text_output",)),
        _grpc("ensemble", model="ensemble", tensors=text, outputs=("text_output",)),
        _grpc("tensorrt_llm", model="tensorrt_llm", tensors=ids, outputs=("output_ids",)),
    ]


def _by_client() -> list[Item]:
    asked: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "three sampled sequences": {"temperature": 1.0, "seed": 11, "num_return_sequences": 3},
        "stop words": {"temperature": 1.0, "seed": 4, "stop_words": [" park", "very big"]},
        "long": {"temperature": 1.0, "seed": 2, "max_tokens": 300},
    }
    return [
        Item(
            f"client: {name}",
            Front.TRITONSERVER,
            "llm",
            lambda endpoints: endpoints.grpc,
            partial(ask_client, prompt=PROMPT, options={"max_tokens": LENGTH, **options}),
        )
        for name, options in asked.items()
    ]


def _over_http() -> list[Item]:
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "temperature": 1.0, "seed": 21, "stream": True, "end_id": -1}
    door = partial(ask_generate_stream, body=body)
    return [Item("generate_stream", Front.TRITONSERVER, "llm", lambda endpoints: f"http://{endpoints.http}", door)]


def _openai() -> list[Item]:
    usual = {"model": "llm", "max_tokens": LENGTH, "stream": True}
    chat = {**usual, "messages": [{"role": "user", "content": STORY}]}
    response = {"model": "llm", "input": STORY, "max_output_tokens": LENGTH, "stream": True, "temperature": 0}
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog", "fox"]}, "age": {"type": "integer"}},
        "required": ["animal", "age"],
    }
    guided = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    completions, chats, responses = "/v1/completions", "/v1/chat/completions", "/v1/responses"
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "completion": (completions, {**usual, "prompt": PROMPT, "temperature": 0, "ignore_eos": True}),
        "two sampled completions": (completions, {**usual, "prompt": PROMPT, "n": 2, "seed": 3, "temperature": 1.0}),
        "long completion": (completions, {**usual, "prompt": PROMPT, "seed": 9, "temperature": 1.0, "max_tokens": 300}),
        "chat with usage": (chats, {**chat, "temperature": 0, "stream_options": {"include_usage": True}}),
        "chat that follows a schema": (chats, {**chat, "seed": 4, "temperature": 1.0, "response_format": guided}),
        "adapter": (completions, {**usual, "model": "pirate", "prompt": PROMPT, "temperature": 0}),
        "response": (responses, response),
    }
    return [
        Item(
            f"OpenAI: {name}",
            Front.OPENAI,
            "",
            lambda endpoints: f"http://{endpoints.openai}",
            partial(ask_openai, path=path, body=body),
        )
        for name, (path, body) in asked.items()
    ]
