"""Checkpoints of other families than Llama, with random bfloat16 weights, as published or shrunk to 2 GB at most."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ci.bench.checkpoint import MAX_POSITIONS, TOKENIZER_FILES, VOCAB_SIZE

FAMILIES: dict[str, Mapping[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    # Of 24 layers 3, of 32 experts 8.
    "gpt-oss-shrunk": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
    },
    # DeepSeek-V2-Lite: of 27 layers 5, of 64 experts 8, of which 3 and not 6 are chosen. Queries are narrow, as in the
    # larger models: llama.cpp knows one whose are not by its number of layers.
    "deepseek-v2-shrunk": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": True,
    },
    # Qwen3-30B-A3B: of 48 layers 4, of 128 experts 32.
    "qwen3-moe-shrunk": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
}
"""Values of config.json."""


def make_family(folder: Path, tokenizer: Path, values: Mapping[str, Any]) -> Path:
    """The checkpoint in `folder`, made if it is missing, with the tokenizer of another, which is never used."""
    if not Path(folder, TOKENIZER_FILES[-1]).exists():
        from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import

        torch.manual_seed(0)
        shared = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS}
        config = AutoConfig.for_model(**shared | dict(values))
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(Path(tokenizer, name), folder)
    return folder
