"""Random adapters as PEFT saves them, and networks with their weights merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_checkpoints import TinyCheckpoint
from torch import Tensor

from inflight.lora import AdapterModule, AdapterPart, LoraConfig

MODULE_IDS = {
    "qkv_proj": 0,
    "q_proj": 1,
    "k_proj": 2,
    "v_proj": 3,
    "o_proj": 4,
    "gate_proj": 5,
    "down_proj": 6,
    "up_proj": 7,
    "gate_up_proj": 18,
}
"""TensorRT-LLM's numbers."""
TARGETS = (*MODULE_IDS, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")


@dataclass(frozen=True)
class RandomAdapter:
    """A and B of each adapted layer, by the layer's name, and the scale of their product."""

    matrices: dict[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float
    use_rslora: bool

    @classmethod
    def of(
        cls,
        checkpoint: TinyCheckpoint,
        seed: int,
        *,
        rank: int = 4,
        alpha: float = 8.0,
        use_rslora: bool = False,
        targets: tuple[str, ...] = TARGETS,
        strength: float = 0.25,
    ) -> RandomAdapter:
        generator = torch.Generator().manual_seed(seed)
        scale = alpha / (rank**0.5 if use_rslora else rank)
        matrices = {}
        for name, module in checkpoint.model.named_modules():
            if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
                a = torch.randn(rank, module.in_features, generator=generator)
                b = torch.randn(module.out_features, rank, generator=generator)
                matrices[name] = (a / rank**0.5, b * (strength / scale))
        assert matrices, "no layer is adapted"
        return cls(matrices, rank, alpha, use_rslora)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        """Write it as PEFT does. `changes`: of adapter_config.json."""
        folder.mkdir(parents=True)
        tensors = {}
        for name, pair in self.matrices.items():
            for letter, matrix in zip("AB", pair, strict=True):
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = matrix.to(dtype).contiguous()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "use_dora": False,
            "bias": "none",
            "modules_to_save": None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "target_modules": sorted({name.rpartition(".")[2] for name in self.matrices}),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        return folder

    def lora_config(self, task_id: int, *, dtype: type = np.float32) -> LoraConfig:
        """The same in TensorRT-LLM's layout."""
        weights, config = self.tensors(dtype)
        return LoraConfig.of(task_id, weights, config)

    def tensors(self, dtype: type = np.float32) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rows, config = [], []
        for name, (a, b) in self.matrices.items():
            parts = name.split(".")
            config.append((MODULE_IDS[parts[-1]], int(parts[parts.index("layers") + 1]), self.rank))
            rows.append(torch.cat([a.flatten(), (b * self.scale).flatten()]).numpy().astype(dtype))
        weights = np.zeros((len(rows), max(map(len, rows))), dtype)
        for target, row in zip(weights, rows, strict=True):
            target[: len(row)] = row
        return weights, np.array(config, np.int32)

    def part(self, uid: int) -> AdapterPart:
        """As the leader sends it to the ranks."""
        modules = [
            AdapterModule(name, self.rank, self.scale, "float32", a.numpy().tobytes(), b.numpy().tobytes())
            for name, (a, b) in self.matrices.items()
        ]
        return AdapterPart(uid=uid, modules=modules)

    @contextmanager
    def merged(self, checkpoint: TinyCheckpoint) -> Iterator[TinyCheckpoint]:
        """The checkpoint whose weights are W + scale * B A."""
        model = copy.deepcopy(checkpoint.model)
        modules = dict(model.named_modules())
        with torch.no_grad():
            for name, (a, b) in self.matrices.items():
                modules[name].weight += self.scale * (b @ a)
        yield TinyCheckpoint(checkpoint.folder, model, checkpoint.margin)
