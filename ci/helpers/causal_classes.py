"""Every class that transformers has for causal language models, tried with a tiny configuration made from its defaults.

Sizes are found by the names that configurations have for them; what a class needs besides stands in `ITS_OWN`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model_driver import Driver, Work
from tiny_checkpoints import SIZES, write_checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers_ranks import Case, serve
from transformers_runner import NUM_TOKENS, load

from inflight.errors import ConfigurationError
from inflight.models.transformers_config import TransformersConfig
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.models.transformers_experts import find_experts
from inflight.models.transformers_plan import NotSplit, check_plan
from inflight.models.transformers_refusals import REFUSED

LENGTHS = (5, 21)
"""Of prompts, in tokens: one is longer than the windows."""
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 3, 4, 2, 16
LEAST: dict[str, Any] = {
    **{key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size", "dim_feedforward"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), KV_HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim"), HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": 9,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("vocab_size_per_layer_input", "n_words"), SIZES["vocab_size"]),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("base_channels", "latent_channels"), 32),
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "forced_eos_token_id": None,
}
"""By a key of configurations."""
LATENT = {"head_dim": 8, "num_key_value_heads": HEADS}
"""Of latent attention: its heads' size is that of the rotated part."""
NUMBERS = {"bos_token_id": 1, "eos_token_id": 202}
"""Of configurations that must have them."""
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_PER_TYPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPES = dict.fromkeys(WINDOWS, _PER_TYPE)
ITS_OWN: dict[str, dict[str, Any]] = {
    "cohere2_moe": {
        "layer_types": WINDOWS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": dict(_PER_TYPE),
    },
    "cohere_compass_text": {
        "layer_types": WINDOWS,
        "rope_parameters": {kind: {**_PER_TYPE, "mrope_section": [2, 2, 4]} for kind in WINDOWS},
    },
    "cwm": {**NUMBERS, "layer_types": WINDOWS},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "layer_types": WINDOWS},
    "emu3": {"text_config": {**NUMBERS}},
    "gemma3n_text": {
        "intermediate_size": [INNER] * LAYERS,
        "layer_types": WINDOWS,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        "num_kv_shared_layers": 0,
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
        "attention_layers": ["global", "local", "global"],
        "window_size": 9,
    },
    "modernbert-decoder": {
        **NUMBERS,
        "layer_types": WINDOWS,
        "rope_parameters": ROPES,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 16)},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid", "linear_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "bloom": {"seq_length": 128},
}


def defaults_of(model_type: str) -> dict[str, Any]:
    return CONFIG_MAPPING[model_type]().to_dict()


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Raises what transformers raises for what it does not accept."""
    own = ITS_OWN.get(model_type, {})
    defaults = defaults_of(model_type)
    values = {**_shrunken(defaults), **(LATENT if "qk_rope_head_dim" in defaults else {})}
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**_merged(values, own))
    return config


def _merged(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """With `own` values of configurations inside of it, too."""
    merged = {**values, **own}
    for key, value in own.items():
        if key.endswith("_config") and isinstance(values.get(key), dict):
            merged[key] = _merged(values[key], value)
    return merged


def _shrunken(defaults: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in defaults.items():
        if key.endswith("_config") and isinstance(value, dict) and "model_type" in value:
            changed[key] = {"model_type": value["model_type"], **_shrunken(value)}
        elif key in LEAST and not (key == "sliding_window" and value is None):
            changed[key] = LEAST[key]
    return changed


MODEL_TYPES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Name of a model type -> the class."""
TOGETHER, ONE_BY_ONE, REFUSAL = "all sequences together", "one sequence at a time", "refused: "


def refusal_of(model_type: str, folder: Path) -> str:
    """Why its config.json alone is refused, written to `folder`; empty if it is not."""
    architecture = MODEL_TYPES[model_type]
    values: dict[str, Any] = {"model_type": model_type}
    if architecture not in REFUSED:
        values = tiny_config(model_type).to_dict()
    folder.mkdir()
    text = json.dumps({**values, "architectures": [architecture]}, default=lambda dtype: str(dtype))
    (folder / "config.json").write_text(text)
    try:
        TransformersConfig.load(folder)
    except ConfigurationError as error:
        return str(error).partition(f"{architecture} ")[2].removeprefix("cannot be served: ")
    return ""


def tried(model_type: str, folder: Path) -> str:
    """How a class is served, whose greedy tokens are then those of transformers' `generate`, or why it is not. Raises
    AssertionError for other tokens, and ConfigurationError for a class that is refused with its weights only."""
    if reason := refusal_of(model_type, folder / "config"):
        return f"{REFUSAL}{reason}"
    checkpoint = write_checkpoint(folder / "whole", tiny_config(model_type), 1)
    prompts = [checkpoint.prompt(length, NUM_TOKENS) for length in LENGTHS]
    runner = load(folder / "whole", model_impl="transformers")
    try:
        works = [Work(prompt=prompt, max_tokens=NUM_TOKENS, chunk=7) for prompt, _ in prompts]
        outputs = Driver(runner).run(works)
        alone = Driver(runner).run([Work(prompt=prompts[-1][0], max_tokens=NUM_TOKENS)])
        assert [*outputs, *alone] == [tokens for _, tokens in (*prompts, prompts[-1])], model_type
        return TOGETHER if isinstance(runner._computation.decoder, TransformersDecoder) else ONE_BY_ONE
    finally:
        runner.close()


def against_ranks(model_type: str) -> str:
    """Why its configuration alone keeps it from being split over two ranks; empty if it does not."""
    try:
        check_plan(MODEL_TYPES[model_type], tiny_config(model_type), 2)
    except NotSplit as reason:
        return str(reason)
    return ""


def try_on_ranks(model_types: Sequence[str], folder: Path) -> None:
    """Raises AssertionError where two ranks give other tokens than transformers' `generate`, with parts of experts or
    with whole ones."""
    cases, expected = [], []
    for model_type in model_types:
        checkpoint = write_checkpoint(folder / model_type, tiny_config(model_type), 1)
        prompts = [checkpoint.prompt(length, NUM_TOKENS) for length in LENGTHS]
        for num_sets in (1, 2) if has_experts(model_type) else (1,):
            works = [Work(prompt=prompt, max_tokens=NUM_TOKENS, chunk=7) for prompt, _ in prompts]
            options = {"moe_expert_parallel_size": num_sets}
            cases.append(Case(folder=checkpoint.folder, works=works, options=options))
            expected.append((model_type, num_sets, [tokens for _, tokens in prompts]))
    for answers in serve(cases):
        found = [[work.output for work in answer.works] for answer in answers]
        for (*case, tokens), outputs in zip(expected, found, strict=True):
            assert outputs == tokens, case


def has_experts(model_type: str) -> bool:
    """Whether this engine computes experts of the class."""
    with torch.device("meta"):
        return bool(find_experts(AutoModelForCausalLM.from_config(tiny_config(model_type))))
