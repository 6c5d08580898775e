"""What llama.cpp's conversion does to a tensor of transformers: where its elements go, under which names, and how their
values change.

Legend: D inputs, H heads, K key heads of a DeltaNet, R value heads of each, L elements of a latent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ADDS_ONE = ("gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
DENSE_OF_KIMI = re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj)")
"""transformers gives dense feed-forwards the names of experts when it saves."""
TILED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Of their DeltaNets the file has the first value head of each key head, then the second of each."""


@dataclass(frozen=True)
class Change:
    forth: Callable[[Tensor], Tensor] = lambda values: values
    back: Callable[[Tensor], Tensor] = lambda values: values


def change_of(config: Any, architecture: str, key: str) -> Change:
    """Of the values of the tensor `key` of transformers; `architecture`: llama.cpp's name."""
    if key.endswith("A_log"):
        return Change(lambda values: -values.exp(), lambda values: (-values).log())
    if architecture in ADDS_ONE and key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        return Change(lambda values: values + 1, lambda values: values - 1)
    if config.model_type == "falcon_h1" and (factor := _factor(config, key)) is not None:
        return Change(lambda values: values * factor, lambda values: values / factor)
    return Change()


def parts_of(config: Any, key: str, tensor: Tensor) -> dict[str, Tensor]:
    """The elements of the tensor `key` of transformers in the file's order, by names that the gguf package knows."""
    kind = config.model_type
    if kind == "granitemoe" or (kind == "granitemoehybrid" and "block_sparse_moe.input_linear" in key):
        if "input_linear" in key:
            gate, up = tensor.chunk(2, 1)
            experts = key.replace("block_sparse_moe.input_linear", "mlp.experts.{}_proj")
            return {experts.format("gate"): gate, experts.format("up"): up}
    elif kind == "gpt_oss" and ".experts." in key:
        return _of_gpt_oss(key, tensor)
    elif kind == "granitemoehybrid" and "shared_mlp" in key:
        return _of_shared_mlp(key, tensor, "mlp.shared_expert" if config.num_local_experts else "mlp")
    elif kind == "qwen3_next" and "in_proj_qkvz" in key:
        return _of_qwen3_next(config, key, tensor)
    elif "kv_b_proj" in key:
        by_head = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        return {key.replace("kv_b", "k_b"): keys.mT, key.replace("kv_b", "v_b"): values}
    elif "query_key_value" in key:
        by_head = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return {key: by_head.transpose(0, 1).reshape(tensor.shape)}
    elif kind == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return {key: tensor.T}
    elif kind == "kimi_linear":
        key = DENSE_OF_KIMI.sub(".mlp.", key)
    if kind in TILED and "linear_attn" in key:
        tensor = _tiled(config, key, tensor)
    return {_renamed(key): _reshaped(config, key, tensor)}


def _of_gpt_oss(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Rows of gate and up by turns, and weights (E, inputs, outputs)."""
    name, ending = (key.removesuffix("_bias"), ".bias") if key.endswith("_bias") else (key, ".weight")
    rows = tensor if ending == ".bias" else tensor.mT
    if not name.endswith("gate_up_proj"):
        return {f"{name}{ending}": rows}
    return {f"{name.replace('gate_up', half)}{ending}": rows[:, at::2] for at, half in enumerate(("gate", "up"))}


def _of_shared_mlp(key: str, tensor: Tensor, name: str) -> dict[str, Tensor]:
    """Of Granite 4."""
    if "output_linear" in key:
        return {key.replace("shared_mlp.output_linear", f"{name}.down_proj"): tensor}
    halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
    return {key.replace("shared_mlp.input_linear", f"{name}.{half}_proj"): rows for half, rows in halves}


def _of_qwen3_next(config: Any, key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Queries, keys, values and gates of each key head by turns."""
    of_values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    by_head = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1])
    sections = by_head.split([config.linear_key_head_dim, config.linear_key_head_dim, of_values, of_values], 1)
    *channels, gates = (section.flatten(0, 1) for section in sections)
    return {key.replace("qkvz", "qkv"): torch.cat(channels), key.replace("qkvz", "z"): gates}


def _tiled(config: Any, key: str, tensor: Tensor) -> Tensor:
    """Rows, or columns of the output, by value heads."""
    num_heads, num_key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    if "out_proj" in key:
        return _by_turns(tensor.mT, num_heads, num_key_heads).mT
    if "in_proj_qkv" in key or "conv1d" in key:
        keys, values = tensor.tensor_split([2 * num_key_heads * config.linear_key_head_dim])
        return torch.cat([keys, _by_turns(values, num_heads, num_key_heads)])
    return tensor if key.endswith("norm.weight") else _by_turns(tensor, num_heads, num_key_heads)


def _by_turns(rows: Tensor, num_heads: int, num_key_heads: int) -> Tensor:
    """(K, R, ...) -> (R, K, ...)."""
    by_head = rows.reshape(num_key_heads, num_heads // num_key_heads, -1, *rows.shape[1:])
    return by_head.transpose(0, 1).reshape(rows.shape)


def _renamed(key: str) -> str:
    """Names that are tensors' own get an ending."""
    if key.endswith("sinks"):
        return f"{key}.weight"
    for name, its in (
        ("e_score_correction_bias", "e_score_correction.bias"),
        ("expert_bias", "expert_bias.bias"),
        ("mixer.dt_bias", "mixer.dt.bias"),
        (".dt_bias", ".dt_proj.bias"),
        ("layer_scalar", "layer_scalar.weight"),
        ("router.scale", "router.proj.scale"),
        ("router.per_expert_scale", "experts.down_proj.scale"),
        ("experts.gate_up_proj", "experts.gate_up_proj.weight"),
        ("experts.down_proj", "experts.down_proj.weight"),
    ):
        if key.endswith(name):
            return key.removesuffix(name) + its
    return key.replace("backbone", "model").replace("mixer", "mlp") if ".mixer.experts." in key else key


def _reshaped(config: Any, key: str, tensor: Tensor) -> Tensor:
    if config.model_type == "kimi_linear" and "_conv1d" in key:
        return tensor[None]
    if key.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.squeeze(1)
    if key.endswith((".mamba.A_log", ".mamba.D", ".mixer.A_log", ".mixer.D")):
        return tensor.unsqueeze(1)
    if key.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return tensor.view(getattr(config, "n_groups", 1), -1)
    return tensor


def _factor(config: Any, key: str) -> Any:
    """Of Falcon-H1's constants, with which its weights are multiplied: a number, or one a row."""
    of_attention = config.attention_in_multiplier
    factors: dict[str, Any] = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * of_attention,
        "q_proj": of_attention,
        "v_proj": of_attention,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    name = key.split(".")[-2]
    if name != "in_proj":
        return factors.get(name)
    shared = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm, config.mamba_d_ssm, shared, shared, config.mamba_n_heads]
    sections = zip(sizes, config.ssm_multipliers, strict=True)
    return torch.cat([torch.full((size, 1), config.ssm_in_multiplier * each) for size, each in sections])
