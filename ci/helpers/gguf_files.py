"""Checkpoints of transformers as GGUF files, written with the gguf package's writer, and the same network with the
numbers that its quantised weights stand for.

Tensors are called, and changed, as llama.cpp's own conversion does it, with the metadata that it writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from gguf_changes import change_of, parts_of
from gguf_gemma4 import size_of_global_heads
from gguf_keys import MORE_KEYS, NAMES_WINDOWS, kind_of, layers_that_attend
from gguf_networks import CONFIGS, WIDE
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, needs_eager, write_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "olmo3": "olmo2",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "cohere": "command-r",
    "phi": "phi2",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "kimi_linear": "kimi-linear",
    "falcon_h1": "falcon-h1",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "gpt_neox": "gptneox",
}
"""Of llama.cpp, where transformers' model_type has another name."""
ROTATES_NEIGHBOURS = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "arcee")
NOT_QUANTIZED = (
    *("gate.weight", "router.weight", "router.layer.weight", "router.proj.weight", ".bias"),
    *("conv1d.weight", "conv.conv.weight", "norm.weight", ".A_log", ".D"),
)
"""Endings of routers, of the biases of all experts, of convolutions and of numbers of heads."""
ONE_OF_EXPERTS = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
Q8_0, Q4_0 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0
K_QUANTS = {
    GGMLQuantizationType.Q2_K: ((80, 4e-3), (82, 6e-3)),
    GGMLQuantizationType.Q3_K: ((108, 1.5e-3),),
    GGMLQuantizationType.Q4_K: ((0, 3e-4), (2, 2.2e-3)),
    GGMLQuantizationType.Q5_K: ((0, 1.5e-4), (2, 2.2e-3)),
    GGMLQuantizationType.Q6_K: ((208, 5e-5),),
}
"""Which the gguf package only reads: where a block has its units in float16, and those of a layer's weights."""
UNWRITTEN = frozenset(kind for kind in GGMLQuantizationType if kind.name.startswith(("IQ", "NVFP4")))
"""Others that it only reads, of which blocks of zeros are written."""

TypeOf = Callable[[str], GGMLQuantizationType]
"""transformers' name of a matrix -> the type that it is written in."""


@dataclass(frozen=True)
class GgufModel:
    """A file, and a checkpoint of safetensors with the same numbers in float32."""

    file: Path
    dense: TinyCheckpoint


def write_model(
    folder: Path,
    network: str | PreTrainedConfig,
    kind: GGMLQuantizationType | TypeOf,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
    *,
    stacks_experts: bool = True,
    fuses_experts: bool = False,
    tensors_of_part: int = 0,
) -> GgufModel:
    """Write the random network, which may be named as in CONFIGS, to `folder`. `change`: writes more.
    `stacks_experts`: else each has tensors of its own, as in files of 2023; `fuses_experts`: gates and ups are one
    tensor. `tensors_of_part`: at most; 0 = all are in one file."""
    config, dense = CONFIGS[network] if isinstance(network, str) else network, folder / "dense"
    name = network if isinstance(network, str) else config.model_type
    write_checkpoint(dense, config, len(name))
    type_of = kind if callable(kind) else lambda _: kind
    path = folder / f"{name}.gguf"
    writer = GGUFWriter(path, ARCHITECTURES.get(kind_of(config), kind_of(config)), split_max_tensors=tensors_of_part)
    _write_metadata(writer, config)
    written: dict[str, _Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(dense / "model.safetensors").items():
        numbers[key] = torch.empty(tensor.shape)
        # Where its elements go.
        for part, places in parts_of(config, key, torch.arange(tensor.numel()).view(tensor.shape)).items():
            of_values = change_of(config, writer.arch, key)
            written[part] = _Tensor.of(part, of_values.forth(tensor.flatten()[places]), type_of(part))
            numbers[key].view(-1)[places] = of_values.back(written[part].numbers)
    _write_tensors(writer, config, written, stacks_experts, fuses_experts)
    change(writer)
    finish(writer)
    save_file(numbers, dense / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    if needs_eager(config):
        model.set_attn_implementation("eager")
    return GgufModel(sorted(folder.glob("*.gguf"))[0] if tensors_of_part else path, TinyCheckpoint(dense, model.eval()))


def write_file(path: Path, checkpoint: Path, kind: GGMLQuantizationType) -> None:
    """The checkpoint in a folder, whatever its type and size, as a file without a vocabulary."""
    config = AutoConfig.from_pretrained(checkpoint)
    writer = GGUFWriter(path, ARCHITECTURES.get(kind_of(config), kind_of(config)))
    _write_metadata(writer, config)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    written: dict[str, _Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            of_values = change_of(config, writer.arch, key)
            for part, values in parts_of(config, key, tensor).items():
                written[part] = _Tensor.of(part, of_values.forth(values.float()), kind)
    _write_tensors(writer, config, written, stacks_experts=True, fuses_experts=False)
    finish(writer)


def random_k_quants(name: str, shape: torch.Size, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Rows of blocks of any bytes, but for the units, which give weights of a layer of 256 inputs."""
    rng, (block_size, num_bytes) = np.random.default_rng([*name.encode()]), gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape.numel() // block_size, num_bytes), dtype=np.uint8)
    for place, unit in K_QUANTS[kind]:
        units = unit * rng.uniform(0.5, 1.5, (len(blocks), 1))
        blocks[:, place : place + 2] = units.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


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
    if kind != "llama":
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    if kind != "gpt2":
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

    @property
    def numbers(self) -> torch.Tensor:
        """What it stands for."""
        return torch.from_numpy(dequantize(self.stored, self.kind).copy())

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, kind: GGMLQuantizationType) -> _Tensor:
        if tensor.dim() < 2 or name.endswith(NOT_QUANTIZED):
            kind = F32
        if kind in K_QUANTS:
            stored = random_k_quants(name, tensor.shape, kind)
        elif kind in UNWRITTEN:
            block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            stored = np.zeros((tensor.shape[0], tensor.shape[1] // block_size * num_bytes), np.uint8)
        else:
            stored = quantize(tensor.float().numpy(), kind)
        return cls(stored, kind)


def _write_tensors(
    writer: GGUFWriter, config: Any, tensors: dict[str, _Tensor], stacks_experts: bool, fuses_experts: bool
) -> None:
    architecture = writer.arch
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    experts: dict[str, list[_Tensor]] = {}
    written: dict[str, tuple[NDArray[Any], GGMLQuantizationType]] = {}
    for key, tensor in tensors.items():
        if found := ONE_OF_EXPERTS.fullmatch(key):
            experts.setdefault(f"{found[1]}.{found[3]}", []).insert(int(found[2]), tensor)
            continue
        stored = tensor.stored
        if architecture in ROTATES_NEIGHBOURS and (".q_proj." in key or ".k_proj." in key):
            stored = _alternate(stored, config.num_attention_heads if ".q_" in key else config.num_key_value_heads)
        written[_name(names, key)] = stored, tensor.kind
    for key, of_one in experts.items():
        name = _name(names, key)
        if stacks_experts:
            written[name] = np.stack([each.stored for each in of_one]), of_one[0].kind
            continue
        for number, each in enumerate(of_one):
            written[name.replace("_exps", f".{number}")] = each.stored, each.kind
    for name in [name for name in written if fuses_experts and "ffn_gate_exps" in name]:
        (gate, kind), (up, _) = written.pop(name), written.pop(name.replace("gate", "up"))
        written[name.replace("gate", "gate_up")] = np.concatenate([gate, up], 1), kind
    for name, (stored, kind) in written.items():
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
    rope = _rope(config)
    if rope is not None and rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config.head_dim))
    if rope is not None and rope["rope_type"] == "proportional":
        num_pairs = size_of_global_heads(config) // 2
        is_rotated = np.arange(num_pairs) < int(num_pairs * rope["partial_rotary_factor"])
        writer.add_tensor("rope_freqs.weight", np.where(is_rotated, 1.0, 1e30).astype(np.float32))


def _name(names: gguf.TensorNameMap, key: str) -> str:
    """Some stand there without the first part."""
    found = (
        names.get_name(each, try_suffixes=(".weight", ".bias", ".scale")) for each in (key, key.removeprefix("model."))
    )
    name = next(filter(None, found), None)
    assert name is not None, key
    return name


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


def _rope(config: Any) -> dict[str, Any] | None:
    """Of layers without a window, where those with one have others; None where none are rotated."""
    parameters: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    return None if parameters is None else parameters.get("full_attention", parameters)


def _write_metadata(writer: GGUFWriter, config: Any) -> None:
    config = deepcopy(config)
    config.allow_global_per_layer_attribute_access = True  # sizes of most layers, where some have others
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if (intermediate_size := getattr(config, "intermediate_size", None)) is not None:
        writer.add_feed_forward_length(intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    attends = layers_that_attend(config)
    of_keys = getattr(config, "num_key_value_heads", config.num_attention_heads)
    writer.add_head_count_kv(of_keys if all(attends) else [of_keys * each for each in attends])
    epsilons = (getattr(config, name, None) for name in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"))
    of_layer_norm = next(filter(None, epsilons), getattr(config, "norm_eps", None))
    if of_layer_norm is None or config.model_type.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", of_layer_norm))
    else:
        writer.add_layer_norm_eps(of_layer_norm)
    if (rope := _rope(config)) is not None:
        _write_rope(writer, config, rope)
    is_global = set(getattr(config, "layer_types", None) or ()) == {"full_attention"}
    for key, name in MORE_KEYS.get(kind_of(config), {}).items():
        value = name(config) if callable(name) else getattr(config, name, None)
        if value is None or (name == "sliding_window" and is_global):
            continue
        kinds: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
        kinds[type(value)](f"{writer.arch}.{key}", value)


def _write_rope(writer: GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    """And sizes of heads."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    of_windows = config.rope_parameters.get("sliding_attention", rope)["rope_theta"]
    if of_windows not in (rope["rope_theta"], 10000.0):
        writer.add_rope_freq_base_swa(of_windows)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config.model_type in NAMES_WINDOWS and config.sliding_window is not None:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
