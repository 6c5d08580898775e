"""Tiny random checkpoints that read images, of every architecture that does, and what transformers generates with them.

Each has a tokenizer of bytes, the processor that its class has at the hub, and a chat template with places for images.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
from PIL import Image
from tiny_checkpoints import CONFIGS, fill_with_noise
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Idefics3Config,
    Idefics3Processor,
    LlavaConfig,
    LlavaProcessor,
    Mistral3Config,
    PixtralImageProcessorPil,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from inflight.text.byte_tokens import alphabet

END, CLIP_IMAGE, PIXTRAL_IMAGE = "<end>", "<image>", "[IMG]"
SPECIAL = (
    *(END, CLIP_IMAGE, PIXTRAL_IMAGE, "[IMG_BREAK]", "[IMG_END]"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
VOCAB_SIZE = 280
MARGIN = 1e-3
"""By which the logit of each expected token leads: rounding does not decide."""
CLIP: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
    "num_hidden_layers": 2,
}
PIXTRAL = {**CLIP, "model_type": "pixtral", "head_dim": 8, "image_size": 56}
SIGLIP = {**CLIP, "num_hidden_layers": 1}


class NearTie(Exception):
    """The expected tokens depend on rounding."""


def text_of(name: str) -> dict[str, Any]:
    return {**CONFIGS[name].to_dict(), "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}


def id_of(token: str) -> int:
    return 256 + SPECIAL.index(token)


def _llava(name: str) -> LlavaConfig:
    vision = {**CLIP, "model_type": "clip_vision_model", "projection_dim": 16}
    return LlavaConfig(text_config=text_of(name), vision_config=vision, image_token_id=id_of(CLIP_IMAGE))


def _idefics(kind: type[Idefics3Config]) -> Idefics3Config:
    # Two by two patches become one row.
    return kind(text_config=text_of("llama"), vision_config=SIGLIP, image_token_id=id_of(CLIP_IMAGE), scale_factor=2)


def _idefics_processor(kind: Any, tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    images = kind(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return Idefics3Processor(images, tokenizer, image_seq_len=1)


def _pixtral_processor(tokenizer: PreTrainedTokenizerFast, merged: int) -> Any:
    """Its module imports torchvision for what it does not use here."""
    v2, functional = "torchvision.transforms.v2", "torchvision.transforms.v2.functional"
    modules = {name: ModuleType(name) for name in ("torchvision", "torchvision.transforms", v2, functional)}
    modules[v2].functional = modules[functional]  # type: ignore[attr-defined]
    with patch.dict(sys.modules, modules):
        processor = import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    size = {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}}
    return processor(PixtralImageProcessorPil(**size), tokenizer, patch_size=14, spatial_merge_size=merged)


CONFIGS_WITH_IMAGES: dict[str, PreTrainedConfig] = {
    "llava-llama": _llava("llama"),
    "llava-qwen2": _llava("qwen2"),
    "pixtral": LlavaConfig(
        text_config=text_of("mistral"),
        vision_config=PIXTRAL,
        image_token_id=id_of(PIXTRAL_IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "mistral3": Mistral3Config(
        text_config=text_of("mistral"),
        vision_config=PIXTRAL,
        image_token_id=id_of(PIXTRAL_IMAGE),
        vision_feature_layer=-1,
        spatial_merge_size=2,
    ),
    "idefics3": _idefics(Idefics3Config),
    "smolvlm": _idefics(SmolVLMConfig),
}


def _processor(name: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    if name in ("pixtral", "mistral3"):
        return _pixtral_processor(tokenizer, 2 if name == "mistral3" else 1)
    if name in ("idefics3", "smolvlm"):
        return _idefics_processor(
            Idefics3ImageProcessorPil if name == "idefics3" else SmolVLMImageProcessorPil, tokenizer
        )
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, patch_size=14, **strategy)


def _template(image_token: str) -> str:
    return (
        "{% for message in messages %}{{ message.role }}: "
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}" + image_token + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )


@dataclass(frozen=True)
class ImageCheckpoint:
    folder: Path
    model: Any
    processor: Any

    def expected(self, images: list[Image.Image], content: list[dict[str, Any]], max_tokens: int) -> list[int]:
        """The greedy continuation of a user's message with these parts. Raises NearTie."""
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = self.processor(images=images or None, text=[text], return_tensors="pt")
        output = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for logits in output.logits:
            first, second = logits[0].topk(2).values.tolist()
            if first - second < MARGIN:
                raise NearTie
        tokens: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def make_image_checkpoint(folder: Path, name: str) -> ImageCheckpoint:
    """Write the checkpoint `name` of CONFIGS_WITH_IMAGES to `folder`."""
    config = CONFIGS_WITH_IMAGES[name]
    model = AutoModelForImageTextToText.from_config(config).eval()
    fill_with_noise(model, torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    processor = _processor(name, PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END))
    processor.chat_template = _template(processor.image_token)
    processor.save_pretrained(folder)
    return ImageCheckpoint(folder, model, processor)


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise, in coarse squares, so that scaling leaves something of it."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.NEAREST)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
