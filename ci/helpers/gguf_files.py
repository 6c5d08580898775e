"""Checkpoints of transformers as GGUF files, written with the gguf package's writer, and the same network with the
numbers that its quantised weights stand for.

Tensors are called, and rows of queries and keys put in order, as llama.cpp's own conversion does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SIZES, TinyCheckpoint, write_checkpoint
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

WIDE: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 128}
"""Sizes that have whole groups."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE),
    "llama-tied": LlamaConfig(**{**WIDE, "tie_word_embeddings": True, "head_dim": 32}),
    "llama-biases": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "llama-llama3": LlamaConfig(**{**WIDE, "head_dim": 64}, rope_parameters=LLAMA3),
    "llama-linear": LlamaConfig(**WIDE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    "mistral-window": MistralConfig(**WIDE, head_dim=16, sliding_window=11),
    "mixtral": MixtralConfig(**WIDE, head_dim=16, num_local_experts=4, sliding_window=None),
    "qwen2": Qwen2Config(**WIDE),
    "qwen2-yarn": Qwen2Config(**WIDE, rope_parameters=YARN),
    "qwen3": Qwen3Config(**WIDE, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(
        **WIDE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "phi3": Phi3Config(
        **WIDE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        sliding_window=12,
    ),
    "granite": GraniteConfig(
        **WIDE, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.15, logits_scaling=1.7
    ),
}
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""Of llama.cpp, where transformers' model_type has another name."""
ROTATES_NEIGHBOURS = ("llama", "granite")
F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
Q8_0, Q4_0 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0

TypeOf = Callable[[str], GGMLQuantizationType]
"""transformers' name of a matrix -> the type that it is written in."""


@dataclass(frozen=True)
class GgufModel:
    """A file, and a checkpoint of safetensors with the same numbers in float32."""

    file: Path
    dense: TinyCheckpoint


def write_model(
    folder: Path,
    name: str,
    kind: GGMLQuantizationType | TypeOf,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
) -> GgufModel:
    """Write the random network `name` of CONFIGS to `folder`. `change`: writes more."""
    config, dense = CONFIGS[name], folder / "dense"
    write_checkpoint(dense, config, len(name))
    type_of = kind if callable(kind) else lambda _: kind
    tensors = load_file(dense / "model.safetensors")
    path = folder / f"{name}.gguf"
    writer = GGUFWriter(path, ARCHITECTURES.get(config.model_type, config.model_type))
    _write_metadata(writer, config)
    written = {key: _Tensor.of(key, tensor, type_of(key)) for key, tensor in tensors.items()}
    _write_tensors(writer, config, written)
    change(writer)
    finish(writer)
    save_file({key: tensor.numbers for key, tensor in written.items()}, dense / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    return GgufModel(path, TinyCheckpoint(dense, model.eval()))


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(
    path: Path, tokenizer: tokenizers.Tokenizer, kind: str, division: str | None = None, **values: Any
) -> None:
    """A file of nothing but a tokenizer. `values`: more of its metadata, below tokenizer."""
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, tokenizer, kind, division, **values)
    finish(writer)


def add_tokenizer(
    writer: GGUFWriter, tokenizer: tokenizers.Tokenizer, kind: str, division: str | None = None, **values: Any
) -> None:
    state = json.loads(tokenizer.to_str())
    added = {each["id"]: each["special"] for each in state["added_tokens"]}
    tokens = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    types = [1 if number not in added else 3 if added[number] else 4 for number in range(len(tokens))]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    if division is not None:
        writer.add_tokenizer_pre(division)
    if kind == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    else:
        types = [6 if token.startswith("<0x") else found for token, found in zip(tokens, types, strict=True)]
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types(types)
    for key, value in values.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else None
        (add or writer.add_string)(f"tokenizer.{key}" if key.startswith("chat") else f"tokenizer.ggml.{key}", value)


@dataclass(frozen=True)
class _Tensor:
    stored: NDArray[Any]
    """As the file has it."""
    kind: GGMLQuantizationType
    numbers: torch.Tensor
    """What it stands for."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, kind: GGMLQuantizationType) -> _Tensor:
        if tensor.dim() < 2 or name.endswith("gate.weight"):  # a vector, or a router
            kind = F32
        stored = gguf.quants.quantize(tensor.float().numpy(), kind)
        return cls(stored, kind, torch.from_numpy(gguf.quants.dequantize(stored, kind).copy()))


def _write_tensors(writer: GGUFWriter, config: Any, tensors: dict[str, _Tensor]) -> None:
    architecture = writer.arch
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    experts: dict[str, list[_Tensor]] = {}
    for key, tensor in tensors.items():
        if ".experts." in key:
            head, number, tail = _split_expert(key)
            experts.setdefault(f"{head}.experts.{tail}", []).insert(int(number), tensor)
            continue
        stored = tensor.stored
        if architecture in ROTATES_NEIGHBOURS and (".q_proj." in key or ".k_proj." in key):
            stored = _alternate(stored, config.num_attention_heads if ".q_" in key else config.num_key_value_heads)
        writer.add_tensor(_name(names, key), stored, raw_dtype=tensor.kind)
    for key, of_one in experts.items():
        writer.add_tensor(_name(names, key), np.stack([each.stored for each in of_one]), raw_dtype=of_one[0].kind)
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config.head_dim))


def _name(names: gguf.TensorNameMap, key: str) -> str:
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return name


def _split_expert(key: str) -> tuple[str, str, str]:
    head, _, rest = key.partition(".experts.")
    number, _, tail = rest.partition(".")
    return head, number, tail


def _alternate(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of the halves of each head by turns."""
    halves = np.split(rows, 2 * num_heads)
    pairs = [np.stack(halves[head : head + 2], axis=1) for head in range(0, len(halves), 2)]
    return np.concatenate([pair.reshape(-1, *rows.shape[1:]) for pair in pairs])


def _llama3_factors(rope: dict[str, float], head_dim: int) -> NDArray[np.float32]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    changes = {"rope_parameters": rope, "hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**{**WIDE, **changes}), torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).float().numpy()


def _write_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None) and config.model_type in ("mistral", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts if config.model_type == "mixtral" else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
