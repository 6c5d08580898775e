"""Tiny checkpoints with fp8 weights as compressed-tensors stores them, activations quantised by token, by group of a
token's inputs or with static scales, and the same network with float weights. AutoFP8 and ModelOpt store static ones in
the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SIZES, TinyCheckpoint, make_prompt, write_checkpoint
from torch import Tensor, nn
from transformers import Gemma3TextConfig, PreTrainedConfig, Qwen2Config

from inflight.models.cache_scales import CacheScales

LARGEST = 448.0
"""Of float8_e4m3fn."""
ARGUMENTS = {"type": "float", "num_bits": 8, "symmetric": True, "group_size": None, "actorder": None}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**ARGUMENTS, "strategy": "channel", "dynamic": False, "observer": "minmax"},
            "input_activations": {**ARGUMENTS, "strategy": "token", "dynamic": True, "observer": None},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
STATIC_QUANTIZATION: dict[str, Any] = deepcopy(QUANTIZATION)
"""One scale for all activations that a product multiplies."""
STATIC_QUANTIZATION["config_groups"]["group_0"]["input_activations"] = {
    **ARGUMENTS, "strategy": "tensor", "dynamic": False, "observer": "minmax"
}  # fmt: skip
BLOCK = 128
"""Outputs and inputs that share a scale with `strategy` block, and inputs of a token that do."""
BLOCK_QUANTIZATION: dict[str, Any] = deepcopy(QUANTIZATION)
BLOCK_QUANTIZATION["config_groups"]["group_0"] |= {
    "weights": {
        **ARGUMENTS, "strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False, "observer": "minmax"
    },
    "input_activations": {**ARGUMENTS, "strategy": "group", "group_size": BLOCK, "dynamic": True, "observer": None},
}  # fmt: skip
SHARE = 0.9
"""Of the range of the activations, in that of their static scale: some are beyond it."""
LESSER_SHARES = {"q_proj": 0.5, "v_proj": 0.6, "up_proj": 0.7}
"""Scales of products whose input another one has, too, with a larger scale, which counts."""
CONFIG: PreTrainedConfig = Qwen2Config(**{**SIZES, "hidden_size": 64, "intermediate_size": 128})
"""Biases on queries, keys and values, sizes that kernels and C++ layers take."""
_BLOCK_SIZES = {"hidden_size": 2 * BLOCK, "intermediate_size": 2 * BLOCK, "num_attention_heads": 16}
BLOCK_CONFIG: PreTrainedConfig = Qwen2Config(**{**SIZES, **_BLOCK_SIZES, "num_hidden_layers": 1})
"""Inputs that two ranks can split between blocks; the block of keys is then in two parts, as that of values. C++ does
not compute heads of 16. With one layer few activations move to a neighbouring number."""

GEMMA_CONFIG: PreTrainedConfig = Gemma3TextConfig(
    **{**SIZES, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "sliding_window": 11}
)
"""Norms around the branches, with weights in float32."""


class QuantizedLinear(nn.Module):
    """Multiplies what is left of activations after each token was quantised: all with `input_scale`, or each
    `group_size` of its features with a scale of their own. All of this is part of a reference's digest."""

    weight: Tensor
    input_scale: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, group_size: int, input_scale: Tensor | None) -> None:
        super().__init__()
        self.bias, self.group_size = bias, group_size
        self.register_buffer("weight", weight)
        self.register_buffer("input_scale", input_scale)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}"

    def forward(self, x: Tensor) -> Tensor:
        if self.input_scale is not None:
            rounded = (x / self.input_scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
            return nn.functional.linear(rounded * self.input_scale, self.weight, self.bias)
        parts = [part / scale_of(part) for part in x.split(self.group_size, -1)]
        rounded = [part.to(torch.float8_e4m3fn).float() for part in parts]
        scales = [scale_of(part) for part in x.split(self.group_size, -1)]
        x = torch.cat([part * scale for part, scale in zip(rounded, scales, strict=True)], -1)
        return nn.functional.linear(x, self.weight, self.bias)


def scale_of(x: Tensor) -> Tensor:
    """Of each row, with which its largest magnitude becomes that of fp8."""
    return x.abs().amax(-1, keepdim=True) / LARGEST


def write_fp8_checkpoint(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    strategy: str = "channel",
    num_ranks: int = 1,
    config: PreTrainedConfig = CONFIG,
    dense: Collection[str] = (),
    static: bool = False,
) -> TinyCheckpoint:
    """Write two checkpoints: fp8 to `folder`/fp8, and the dequantised weights in float32 to `folder`/dense.

    `dtype`: of all that is not quantised. `strategy`: of the weights' scales. `dense`: layers that are not quantised.
    `static`: with scales of the activations, too. The result has the folder of the first, and a network of transformers
    that computes it in float32 as `num_ranks` ranks do.
    """
    checkpoint = write_checkpoint(folder / "dense", config, 1, dtype)
    model = checkpoint.model.float()
    tensors = load_file(folder / "dense" / "model.safetensors")
    quantized = dict(tensors)
    largest = _largest_inputs(model) if static else {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name not in ("lm_head", *dense):
            values, scale, weight = _quantize(module.weight.detach(), strategy)
            quantized |= {f"{name}.weight": values, f"{name}.weight_scale": scale}
            tensors[f"{name}.weight"] = weight
            # Of the products that ranks sum each has a part of the inputs.
            share = weight.shape[1] // (num_ranks if name.endswith(("o_proj", "down_proj")) else 1)
            parent, _, child = name.rpartition(".")
            if static:
                of_range = LESSER_SHARES.get(child, SHARE)
                quantized[f"{name}.input_scale"] = torch.tensor([of_range * largest[name] / LARGEST])
            input_scale = torch.tensor(SHARE * largest[name] / LARGEST) if static else None
            linear = QuantizedLinear(weight, module.bias, BLOCK if strategy == "block" else share, input_scale)
            setattr(model.get_submodule(parent), child, linear)
    written: dict[str, Any] = json.loads((folder / "dense" / "config.json").read_text())
    quantization = deepcopy(STATIC_QUANTIZATION if static else QUANTIZATION)
    quantization["config_groups"]["group_0"]["weights"]["strategy"] = strategy
    if strategy == "block":
        quantization = BLOCK_QUANTIZATION
    (folder / "fp8").mkdir()
    (folder / "fp8" / "config.json").write_text(json.dumps({**written, "quantization_config": quantization}))
    save_file(quantized, folder / "fp8" / "model.safetensors")
    save_file(tensors, folder / "dense" / "model.safetensors")
    return TinyCheckpoint(folder / "fp8", model, margin=0.02)


def add_cache_scales(
    folder: Path, names: tuple[str, str] = ("self_attn.k_scale", "self_attn.v_scale")
) -> list[CacheScales]:
    """Give each layer of the checkpoint scales of the KV cache, in the shapes that checkpoints have; they are returned.
    `names`: of both tensors, within their layer."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    scales = [CacheScales(0.05 * (number + 1), 0.03 * (number + 1)) for number in range(SIZES["num_hidden_layers"])]
    for number, of_one in enumerate(scales):
        k_name, v_name = (f"model.layers.{number}.{name}" for name in names)
        tensors |= {k_name: torch.tensor([of_one.k]), v_name: torch.tensor(of_one.v)}
    save_file(tensors, path)
    return scales


def _largest_inputs(model: nn.Module) -> dict[str, float]:
    """Of each linear layer, the largest magnitude of what it multiplies in a prompt."""
    largest: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        largest[name] = float(x.abs().max())

    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0])) for name, module in linears
    ]
    with torch.inference_mode():
        model(torch.tensor([make_prompt(32)]))
    for hook in hooks:
        hook.remove()
    return largest


def _quantize(weight: Tensor, strategy: str) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, inputs) of fp8; bfloat16 scales: (outputs, 1), (1,) for `strategy` tensor, or one for each block; and
    the floats that they mean."""
    outputs, inputs = weight.shape
    sizes = {"channel": (1, inputs), "tensor": (outputs, inputs), "block": (BLOCK, BLOCK)}[strategy]
    padded = nn.functional.pad(weight, (0, -inputs % sizes[1], 0, -outputs % sizes[0]))
    blocks = padded.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0])).transpose(1, 2)
    scale = scale_of(blocks.flatten(2)).squeeze(-1).bfloat16()
    of_output = scale.float().repeat_interleave(sizes[0], 0)[:outputs]
    of_element = of_output.repeat_interleave(sizes[1], 1)[:, :inputs]
    values = (weight / of_element).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values, scale.reshape(1) if strategy == "tensor" else scale, values.float() * of_element
