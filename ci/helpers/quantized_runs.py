"""Engines of checkpoints with quantised weights, in torch on the CPU: their tokens, how far they are from a network of
transformers, and why a checkpoint is refused. And changes of its files.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from safetensors.torch import load_file, save_file

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.runtime.model_runner import ModelRunner

NUM_TOKENS = 12
SAME = 0.02
"""Bound of log probabilities against the network that rounds activations, too. Another order of additions moves a few
of them to a neighbouring number of fp8."""


def load(folder: Path, **options: Any) -> ModelRunner:
    """In the checkpoint's own type, which auto is not on every processor."""
    defaults: dict[str, Any] = {
        "dtype": json.loads((folder / "config.json").read_text()).get("dtype", "auto"),
        "device": "cpu",
        "num_threads": 1,
        "max_batch_size": 8,
        "max_seq_len": 64,
        "max_tokens_in_paged_kv_cache": 512,
        "cpu_compile": "false",  # it adds in another order
    }
    return ModelRunner.load(EngineConfig(gpt_model_path=str(folder), **{**defaults, **options}), SingleRank())


def run(folder: Path, prompts: list[list[int]], **options: Any) -> list[Work]:
    """Sequences that join one after the other, in chunks."""
    works = [
        Work(prompt=prompt, max_tokens=NUM_TOKENS, arrives=2 * place, chunk=9, log_probs=True)
        for place, prompt in enumerate(prompts)
    ]
    with closing(load(folder, **options)) as runner:
        Driver(runner).run(works)
    return works


def distance(work: Work, model: Any) -> float:
    """The largest difference between the log probabilities of a sequence and those that `model` gives its tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([work.prompt + work.output])).logits[0, len(work.prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(work.output)[:, None])[:, 0]
    return float((torch.tensor(work.output_log_probs) - expected).abs().max())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, **options).close()
    return str(caught.value)


def change_tensors(folder: Path, **changed: torch.Tensor | None) -> None:
    """None = the tensor is taken away."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def write_quantization(folder: Path, quantization: dict[str, Any] | None) -> None:
    """None = config.json says nothing of it."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
