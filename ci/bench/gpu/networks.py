"""The networks that are measured: shapes of known models, whose weights are made, and what a token of them costs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    name: str
    """Its number of weights, as it stands in the names of figures."""
    config: dict[str, Any]
    """Of config.json."""
    weight_bytes: int = 2
    """Of one weight of the linear layers; the head has two in any case."""
    cache_bytes: int = 2
    """Of one number of a key or a value."""

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def num_active(self) -> int:
        """Weights by which each token is multiplied: those of all linear layers, the head included, and of the experts
        that a token goes to."""
        return self.num_layers * (self._attention + self.num_chosen * self._mlp) + self._head

    @property
    def num_experts(self) -> int:
        """Of a layer; 0 = it has a dense MLP."""
        return int(self.config.get("num_experts", 0))

    @property
    def num_chosen(self) -> int:
        """Experts that compute each token; a dense MLP is one."""
        return int(self.config.get("num_experts_per_tok", 1))

    @property
    def held_bytes(self) -> int:
        """Of all of those weights, and of all experts."""
        mlps = max(self.num_experts, 1)
        return self.num_layers * self.weight_bytes * (self._attention + mlps * self._mlp) + 2 * self._head

    def read_bytes(self, num_tokens: float) -> float:
        """Of those that a step of so many tokens reads: of the experts those that any of the tokens goes to, on the
        average, where each token goes to any of them with equal probability."""
        unused = (1 - self.num_chosen / self.num_experts) ** num_tokens * self.num_experts if self.num_experts else 0.0
        return self.held_bytes - self.num_layers * self.weight_bytes * unused * self._mlp

    @property
    def token_cache_bytes(self) -> int:
        """Of the keys and values of one token."""
        kv_heads: int = self.config["num_key_value_heads"]
        return 2 * self.num_layers * kv_heads * self._head_dim * self.cache_bytes

    def successors(self, token: int, count: int) -> list[int]:
        """The greedy output behind `token`, which the made weights give whatever stands before it."""
        step = 0 if self.config.get("tie_word_embeddings") else 1
        return [(token + step * number) % self.vocab_size for number in range(1, count + 1)]

    def write(self, parent: Path) -> Path:
        """Its folder, which is made in `parent` and holds its config.json."""
        folder = parent / f"network-{self.name.replace(' ', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return folder

    def tiny(self) -> Network:
        """A network of the same kind for the dry run."""
        experts = {"num_experts": 8, "moe_intermediate_size": 32} if "num_experts" in self.config else {}
        return replace(self, config={**self.config, **TINY, **experts})

    @property
    def _head_dim(self) -> int:
        return int(self.config["head_dim"])

    @property
    def _attention(self) -> int:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        return int(self.config["hidden_size"] * self._head_dim * 2 * (heads + kv_heads))

    @property
    def _mlp(self) -> int:
        """Of one expert, if there are some."""
        inner = self.config.get("moe_intermediate_size", self.config["intermediate_size"])
        return int(3 * self.config["hidden_size"] * inner)

    @property
    def _head(self) -> int:
        return int(self.config["hidden_size"]) * self.vocab_size


TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}

LLAMA_8B = Network(
    name="8B",
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
)
"""Llama 3.1 8B, without the scaling of its positions, for shorter sequences."""

_FP8 = {"type": "float", "num_bits": 8, "symmetric": True}
LLAMA_8B_FP8 = replace(
    LLAMA_8B,
    name="8B fp8",
    config={
        **LLAMA_8B.config,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**_FP8, "strategy": "channel", "dynamic": False},
                    "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": ["lm_head"],
        },
    },
    weight_bytes=1,
    cache_bytes=1,
)
"""With weights, keys and values of eight bits."""

QWEN3_06B = Network(
    name="0.6B",
    config={
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
)

QWEN3_30B_A3B = Network(
    name="30B-A3B",
    config={
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
)
