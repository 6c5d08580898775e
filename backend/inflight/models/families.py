"""The differences between the architectures of the native decoder, as data.

A string names the key of the checkpoint's config.json that holds the value; a constant is the same for every
checkpoint of the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    """Of the attention's output projection."""
    mlp_bias: bool | str = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation."""
    windowed_layers: str = "none"
    """Layers that attend to the last `sliding_window` tokens only: none, all, or those that `layer_types` names."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(windowed_layers="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windowed_layers="layer_types"),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, windowed_layers="layer_types"
    ),
}
"""The first entry of `architectures` in config.json -> its family."""
