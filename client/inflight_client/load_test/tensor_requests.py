"""Prompts as tensors of a tritonserver's model, in perf_analyzer's JSON form.

The model's inputs tell which tensors it takes: those of `llm`, of tensorrtllm_backend's models for text (`ensemble`,
`tensorrt_llm_bls`) or of vllm_backend's `vllm_model`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from inflight_client._exceptions import LoadTestError
from inflight_client.load_test.prompts import Prompt

NO_END = -1


class RequestForm(Enum):
    """Whose tensors a model takes."""

    LLM = "llm"
    TENSORRT_LLM = "tensorrt_llm"
    VLLM = "vllm"

    @classmethod
    def of(cls, model: str, inputs: Collection[str]) -> RequestForm:
        """`inputs`: names of the model's inputs. Raises LoadTestError if none of the forms fits."""
        if "sampling_parameters" in inputs:
            return cls.VLLM
        if {"input_ids", "text_input", "max_tokens"} <= set(inputs):
            return cls.LLM
        if {"text_input", "max_tokens", "end_id"} <= set(inputs):
            return cls.TENSORRT_LLM
        raise LoadTestError(f"the load test does not know the inputs of {model}: measure a model that takes text")

    @property
    def takes_token_ids(self) -> bool:
        return self is RequestForm.LLM

    @property
    def last_text(self) -> str:
        """The output whose text is not empty in the last response with tokens."""
        return "text_output" if self is RequestForm.TENSORRT_LLM else "finish_reason"

    def max_tokens(self, inputs: Mapping[str, Any]) -> int:
        """That of a request, whose inputs perf_analyzer has exported."""
        if self is RequestForm.VLLM:
            return int(json.loads(inputs["sampling_parameters"])["max_tokens"])
        return int(inputs["max_tokens"])


def make_requests(prompts: Sequence[Prompt], temperature: float, form: RequestForm) -> list[dict[str, Any]]:
    """Requests whose answers no end token shortens."""
    return [_request(prompt, temperature, form) for prompt in prompts]


def write_requests(requests: list[dict[str, Any]], path: Path) -> None:
    path.write_text(json.dumps({"data": requests}), encoding="utf-8")


def _request(prompt: Prompt, temperature: float, form: RequestForm) -> dict[str, Any]:
    tensors: dict[str, list[Any]] = {
        "stream": [True],
        "exclude_input_in_output": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }
    sampling = {"max_tokens": prompt.max_tokens, "temperature": temperature, "seed": prompt.seed}
    if form is RequestForm.VLLM:
        tensors["sampling_parameters"] = [json.dumps({**sampling, "ignore_eos": True})]
        tensors["return_finish_reason"] = [True]
    else:
        tensors |= {name: [value] for name, value in sampling.items()} | {"end_id": [NO_END]}
    if isinstance(prompt.content, str):
        tensors["text_input"] = [prompt.content]
    else:
        tensors["input_ids"] = prompt.content
    return {name: {"content": content, "shape": [len(content)]} for name, content in tensors.items()}
