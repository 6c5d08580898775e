"""Networks of the native decoder on a fake device, of any size: composed as a checkpoint is, without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fake_cuda.device import CUDA
from inflight.distributed.mapping import Mapping
from inflight.distributed.tensor_parallel import TensorParallelGroup, TorchTensorParallelGroup
from inflight.models.adapter_places import AdapterPlaces
from inflight.models.checkpoint import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.decoder_loading import load_decoder
from inflight.models.encoder_loading import load_encoder
from inflight.models.weights import WeightLoader

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
"""Two of its layers."""
QWEN3_30B_A3B: dict[str, Any] = {
    **LLAMA_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
"""Likewise, with experts."""
ALTERNATING: dict[str, Any] = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {
        **LLAMA_8B,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 100,
    },
    "qwen2": {**LLAMA_8B, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**LLAMA_8B, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "phi3": {
        **LLAMA_8B,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "granite": {
        **LLAMA_8B,
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "mixtral": {
        **LLAMA_8B,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3 moe": QWEN3_30B_A3B,
    "qwen2 moe": {
        **LLAMA_8B,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    "glm4 moe": {
        **LLAMA_8B,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
    },
    "deepseek v3": {
        **LLAMA_8B,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    },
    "granite moe": {
        **LLAMA_8B,
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "intermediate_size": 512,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 6.0,
    },
    "gpt-oss": {
        **LLAMA_8B,
        **ALTERNATING,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    "gemma 2": {
        **LLAMA_8B,
        **ALTERNATING,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma 3": {
        **LLAMA_8B,
        **ALTERNATING,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "olmo 2": {**LLAMA_8B, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "cohere 2": {
        **LLAMA_8B,
        **ALTERNATING,
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "gpt-neox": {
        **LLAMA_8B,
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "num_key_value_heads": 32,
        "rotary_pct": 0.25,
    },
    "gpt-2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 128256,
        "n_embd": 4096,
        "n_layer": 2,
        "n_head": 32,
        "n_positions": 8192,
        "torch_dtype": "bfloat16",
    },
    "nemotron": {
        **LLAMA_8B,
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "partial_rotary_factor": 0.5,
    },
    "qwen3.5": {
        **LLAMA_8B,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "falcon h1": {
        **LLAMA_8B,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "head_dim": 128,
        "mamba_d_ssm": 4096,
        "mamba_n_heads": 64,
        "mamba_n_groups": 2,
        "mamba_d_state": 128,
    },
}
"""Together of every part: windows, biases, norms on heads, partly rotated heads, scaled parts, experts; soft caps,
sinks, norms behind branches, norms of all heads, LayerNorm, parallel branches, learned positions, no gate, latents,
states of sequences."""
WHOLE_ONLY = frozenset({"olmo 2"})
"""Those of FAMILIES that ranks cannot split."""


BERT_SCORES: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "num_hidden_layers": 2,
    "id2label": {"0": "score"},
    "torch_dtype": "bfloat16",
}
"""Two layers of BERT-base, and a head for one score."""


class NoWeights(Checkpoint):
    """Has every tensor of every shape, and no value."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.is_read = True

    def __exit__(self, *_: object) -> None:
        return None

    def check(self, *_: Any) -> None:
        return None

    def copy_into(self, *_: Any, **__: Any) -> None:
        return None

    def check_scales(self, _: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(shape)

    def read_scale(self, _: str) -> float:
        return 1.0

    def dtype_of(self, _: str) -> str:
        """Every layer of an fp8 checkpoint is quantised."""
        return "F8_E4M3"

    def __contains__(self, _: str) -> bool:
        """Nor has a layer of an AWQ checkpoint a plain weight, or a KV cache scales."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def refuse_leftovers(self, *_: Any) -> None:
        return None


class FakeRanks:
    """Two ranks, of which one runs after the other: the leader's broadcasts are kept for the other one."""

    def __init__(self) -> None:
        self._told: list[bytes] = []

    def rank(self, number: int) -> FakeRank:
        return FakeRank(number, self._told if number == 0 else list(self._told))


@dataclass
class FakeRank:
    """Implements RankGroup."""

    rank: int
    _told: list[bytes]
    size: int = 2
    several_hosts: bool = False

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is None:
            return self._told.pop(0)
        self._told.append(payload)
        return payload

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None

    def abort(self) -> None:
        raise AssertionError("a rank gave up")


class FakeNccl(TorchTensorParallelGroup):
    """One of the ranks that sum through NCCL, whose calls the fake device notes."""

    def __init__(self, rank: int, size: int = 2, *, sums_in_order: bool = False) -> None:
        super().__init__(rank, Mapping(tp=size), CUDA, None, sums_in_order=sums_in_order)

    def all_reduce_min(self, value: int) -> int:
        return value


@dataclass(frozen=True)
class FakeNetwork:
    """One rank's part of a network."""

    config: ModelConfig
    decoder: Decoder
    group: TensorParallelGroup
    adapters: AdapterPlaces = field(default_factory=AdapterPlaces)


def make_network(
    folder: Path,
    values: dict[str, Any],
    *,
    rank: int | None = None,
    max_seq_len: int,
    deterministic: bool = False,
    kv_dtype: torch.dtype | None = None,
    takes_adapters: bool = False,
) -> FakeNetwork:
    """The network of a config.json of these `values`, which is written to `folder`. `rank`: of two; None = alone."""
    (folder / "config.json").write_text(json.dumps(values))
    config = ModelConfig.load(folder)
    group = TensorParallelGroup() if rank is None else FakeNccl(rank)
    places = AdapterPlaces()
    loader = WeightLoader(
        checkpoint=NoWeights(folder),
        weight_format=config.weight_format,
        group=group,
        dtype=torch.bfloat16,
        device=CUDA,
        adapters=places if takes_adapters else None,
        deterministic=deterministic,
        kv_dtype=kv_dtype,
    )
    load_network = load_decoder if config.family.encoder is None else load_encoder
    return FakeNetwork(config, load_network(config, loader, max_seq_len + 1), group, places)
