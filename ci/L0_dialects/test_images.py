"""The tensor `image` as vllm_backend's clients send it, against transformers, on a server with a model that reads them.

Run: pytest ci/L0_dialects/test_images.py
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hostile_images import SVG
from image_checkpoints import ImageCheckpoint, NearTie, file_of, make_image, make_image_checkpoint
from raw_stream import Answer, RawStream
from server_process import MODEL_REPOSITORY, ServerProcess

from .conftest import number, text

NUM_TOKENS = 10
PLACEHOLDER = "<image>"
IMAGE = make_image(60, 33)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> ImageCheckpoint:
    return make_image_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llava-llama")


@pytest.fixture(scope="module")
def url(checkpoint: ImageCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    repository = tmp_path_factory.mktemp("repository")
    (repository / "llm" / "1").mkdir(parents=True)
    shutil.copy(MODEL_REPOSITORY / "llm" / "config.pbtxt", repository / "llm")
    parameters = {
        "gpt_model_path": str(checkpoint.folder),
        "dtype": "float32",
        "num_threads": "1",
        "max_seq_len": "200",
        "max_tokens_in_paged_kv_cache": "4096",
        "lora_dir": "",
        "max_loras": "0",
        "max_images": "2",
    }
    with ServerProcess(model_repository=repository, parameters=parameters, apis=["vllm"]) as server:
        yield server.grpc_url


@pytest.fixture
def wire(url: str) -> Iterator[RawStream]:
    with RawStream(url) as opened:
        yield opened


def images(*files: bytes) -> np.ndarray:
    return np.array([base64.b64encode(file) for file in files], dtype=object)


def ask(wire: RawStream, prompt: str, *files: bytes, model: str = "vllm_model") -> Answer:
    tensors: dict[str, Any] = {"text_input": text(prompt, 1), "image": images(*files)}
    tensors["exclude_input_in_output"] = np.array([True])
    if model == "llm":
        tensors |= {"max_tokens": number(NUM_TOKENS, np.int32, 1), "end_id": number(-1, np.int32, 1)}
    else:
        said = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        tensors |= {"sampling_parameters": text(json.dumps(said), 1)}
    return wire.ask(tensors, model=model)


def test_the_answers_are_those_of_transformers(wire: RawStream, checkpoint: ImageCheckpoint) -> None:
    for seed in range(50):
        content = [{"type": "image"}, {"type": "text", "text": f"what is {seed}?"}]
        try:
            tokens = checkpoint.expected([IMAGE], content, NUM_TOKENS)
            break
        except NearTie:
            continue
    messages = [{"role": "user", "content": content}]
    prompt = checkpoint.processor.apply_chat_template(messages, add_generation_prompt=True)
    answer = ask(wire, prompt, file_of(IMAGE), model="llm")
    assert not answer.error and answer.token_ids == tokens
    streamed = ask(wire, prompt, file_of(IMAGE, "WEBP", lossless=True))
    assert not streamed.error and streamed.text == answer.text


def test_what_is_wrong_is_said_and_the_next_one_is_served(wire: RawStream) -> None:
    file = file_of(IMAGE)
    cases = (
        (f"{PLACEHOLDER}a", [SVG], "image 1 of prompt is no PNG, JPEG, WebP or GIF file"),
        ("a", [file], "writes <image> 0 times for 1 images"),
        (PLACEHOLDER * 3, [file] * 3, "prompt holds 3 images, more than max_images 2"),
    )
    for prompt, files, words in cases:
        assert words in ask(wire, prompt, *files).error
    tensors = {"text_input": text("a", 1), "image": text("%", 1)}
    assert "image must hold files in base64" in wire.ask(tensors, model="vllm_model").error
    assert not ask(wire, f"{PLACEHOLDER}a", file).error
    assert not wire.ask({"text_input": text("a", 1), "image": text("", 1)}, model="vllm_model").error
