"""Tiny checkpoints with random 4-bit weights in AWQ's format, and the same network with the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SIZES, TinyCheckpoint, write_checkpoint
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen2Config

GROUP_SIZE = 32
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of the eight outputs of a word each nibble holds, from the lowest bits up."""
QUANTIZATION = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True, "version": "gemm"}
CONFIG: PreTrainedConfig = Qwen2Config(**{**SIZES, "hidden_size": 64, "intermediate_size": 128})
"""Biases on queries, keys and values, sizes that two ranks can split between groups."""


def write_awq_checkpoint(folder: Path, dtype: torch.dtype = torch.float16) -> TinyCheckpoint:
    """Write two checkpoints: AWQ to `folder`/awq, dense with the same weights in `dtype` to `folder`/dense.

    The result has the folder of the first, and a network of transformers, in float32, with the weights of the second.
    """
    checkpoint = write_checkpoint(folder / "dense", CONFIG, 1, dtype)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "dense" / "model.safetensors")
    packed = dict(tensors)
    for name, module in checkpoint.model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parts, weight = _random_weight(module, dtype, generator)
            del packed[f"{name}.weight"]
            packed |= {f"{name}.{kind}": part for kind, part in parts.items()}
            tensors[f"{name}.weight"] = weight
    config: dict[str, Any] = json.loads((folder / "dense" / "config.json").read_text())
    (folder / "awq").mkdir()
    (folder / "awq" / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    save_file(packed, folder / "awq" / "model.safetensors")
    save_file(tensors, folder / "dense" / "model.safetensors")
    model = checkpoint.model.float()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    return TinyCheckpoint(folder / "awq", model, margin=0.01)


def _random_weight(
    linear: nn.Linear, dtype: torch.dtype, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """AWQ's tensors, and the weight (outputs, inputs) that they mean when it is computed in `dtype`."""
    inputs, outputs = linear.in_features, linear.out_features
    groups = inputs // GROUP_SIZE
    q = torch.randint(0, 16, (inputs, outputs), generator=generator)
    zeros = torch.randint(4, 12, (groups, outputs), generator=generator)
    # Which both types of 16 bits hold.
    scales = (torch.rand((groups, outputs), generator=generator) * 0.03 + 0.01).bfloat16().half()
    steps = (q - zeros.repeat_interleave(GROUP_SIZE, 0)).float()
    weight = (steps * scales.to(dtype).float().repeat_interleave(GROUP_SIZE, 0)).to(dtype).T.contiguous()
    return {"qweight": _words(q), "qzeros": _words(zeros), "scales": scales}, weight


def _words(values: Tensor) -> Tensor:
    """(rows, outputs) of numbers up to 15 as (rows, outputs / 8) int32."""
    eights = values.view(len(values), -1, 8)
    words = sum(eights[:, :, output] << 4 * nibble for nibble, output in enumerate(NIBBLES))
    assert isinstance(words, Tensor)
    return words.to(torch.int32)
