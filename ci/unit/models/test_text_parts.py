"""Checkpoints of a text and others: the text has the tokens that transformers generates with the whole network.

Run: pytest ci/unit/models/test_text_parts.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, TinyCheckpoint, fill_with_noise, make_prompt
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Mistral3Config,
    PreTrainedConfig,
    Qwen3_5Config,
)

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.models.config import ModelConfig
from inflight.models.text_parts import TEXT_PARTS
from inflight.runtime.model_runner import ModelRunner

pytestmark = pytest.mark.slow

VISION = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
NUM_TOKENS = 12


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NOT_UNIFIED = ("model_type", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
"""What the text of Gemma 4's unified networks does not have."""


def text_of(name: str, *left_out: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIGS[name].to_dict().items() if key not in left_out}


WHOLE: dict[str, PreTrainedConfig] = {
    "Qwen3_5ForConditionalGeneration": Qwen3_5Config(
        text_config=text_of("qwen3_5"),
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48},
    ),
    "Gemma3ForConditionalGeneration": Gemma3Config(
        text_config=text_of("gemma3"), vision_config={**VISION, "num_hidden_layers": 1}, mm_tokens_per_image=4
    ),
    "Gemma4ForConditionalGeneration": Gemma4Config(
        text_config=text_of("gemma4"),
        vision_config={
            **SMALL,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "position_embedding_size": 16,
        },
        audio_config={**SMALL, "subsampling_conv_channels": [4, 4], "output_proj_dims": 16},
    ),
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedConfig(
        text_config=text_of("gemma4", *NOT_UNIFIED),
        vision_config={"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
    ),
    "Mistral3ForConditionalGeneration": Mistral3Config(
        text_config=text_of("mistral"), vision_config={**VISION, "model_type": "pixtral", "num_hidden_layers": 1}
    ),
}


def write(folder: Path, architecture: str) -> TinyCheckpoint:
    config = WHOLE[architecture]
    model = AutoModelForImageTextToText.from_config(config).eval()
    assert type(model).__name__ == architecture
    fill_with_noise(model, torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    return TinyCheckpoint(folder, model)


def tokens_of(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    config = EngineConfig(
        gpt_model_path=str(folder),
        device="cpu",
        model_impl="native",
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=64,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=512,
        cpu_compile="false",
    )
    runner = ModelRunner.load(config, SingleRank())
    try:
        return Driver(runner).run([Work(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts])
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", WHOLE)
def test_the_text_has_the_tokens_of_the_whole(tmp_path: Path, architecture: str) -> None:
    checkpoint = write(tmp_path, architecture)
    pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 9, 20)]
    assert tokens_of(tmp_path, [prompt for prompt, _ in pairs]) == [tokens for _, tokens in pairs]
    assert ModelConfig.load(tmp_path).architecture == architecture


@pytest.mark.parametrize(
    "body, head", [("model.language_model", "lm_head"), ("language_model.model", "language_model.lm_head")]
)
def test_names_of_other_versions(tmp_path: Path, body: str, head: str) -> None:
    """As transformers 5 and 4 call the tensors, whatever this version writes; with another part's among them."""
    checkpoint = write(tmp_path, "Mistral3ForConditionalGeneration")
    prompt, tokens = checkpoint.prompt(9, NUM_TOKENS)
    file = tmp_path / "model.safetensors"
    named = {}
    for name, tensor in load_file(file).items():
        is_text = "language_model" in name
        parts = name.split(".")
        last = ".".join(parts[parts.index("language_model") + 1 :]).removeprefix("model.") if is_text else name
        named[f"{body}.{last}" if is_text else name.replace("lm_head", head)] = tensor
    save_file(named, file, {"format": "pt"})
    assert tokens_of(tmp_path, [prompt]) == [tokens]


def test_a_tensor_of_no_part_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "Gemma3ForConditionalGeneration")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "audio_tower.weight": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"does not account for: audio_tower\.weight"):
        tokens_of(tmp_path, [make_prompt(3)])


@pytest.mark.parametrize("architecture", TEXT_PARTS)
def test_nonsense_in_the_texts_options_is_refused(tmp_path: Path, architecture: str) -> None:
    for text, reason in (([1], "text_config must be an object"), ({"hidden_size": "wide"}, "hidden_size must be")):
        values = {"architectures": [architecture], "model_type": "gemma3", "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigurationError, match=reason):
            ModelConfig.load(tmp_path)
