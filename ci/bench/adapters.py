"""LoRA adapters for the checkpoint that is measured: random numbers, on all linear layers; made if they are missing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, KEYS, LAYERS = 576, 1536, 192, 30
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
"""Inputs and outputs."""


def make_adapters(folder: Path, count: int, rank: int) -> Path:
    """`folder`, with PEFT folders a0, a1, …"""
    for number in range(count):
        _make_adapter(folder / f"a{number}", rank, seed=number)
    return folder


def _make_adapter(folder: Path, rank: int, seed: int) -> None:
    if (folder / "adapter_config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, (num_inputs, num_outputs) in LINEARS.items():
            start = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{start}A.weight"] = torch.randn(rank, num_inputs, generator=generator).bfloat16()
            tensors[f"{start}B.weight"] = 0.001 * torch.randn(num_outputs, rank, generator=generator).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
