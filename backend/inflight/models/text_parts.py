"""Architectures whose text alone is served: their checkpoints hold a text network beside others, such as for images.

Their config.json has the text's options in `text_config`, and the text's tensors have names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from inflight.models.family import Family, with_body_names


@dataclass(frozen=True, slots=True)
class TextPart:
    architecture: str
    """Of the text; where `by_type` has some, if config.json does not say its type."""
    others: tuple[str, ...]
    """Beginnings of the names of tensors that are not the text's."""
    by_type: Mapping[str, str] = field(default_factory=dict)
    """Of parts with texts of several kinds: `model_type` of the text -> its architecture."""

    def architecture_of(self, text_type: object) -> str:
        """`text_type`: the `model_type` in the text's options; None = it is not said."""
        if not self.by_type or text_type is None:
            return self.architecture
        return self.by_type.get(str(text_type), str(text_type))


GEMMAS_OTHERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
GEMMA4S_OTHERS = tuple(
    f"model.{name}." for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
)
IDEFICS_OTHERS = ("model.vision_model.", "model.connector.")
PLAIN_TEXTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TEXT_PARTS = {
    "Qwen3_5ForConditionalGeneration": TextPart("Qwen3_5ForCausalLM", ("model.visual.",)),
    "Qwen3_5MoeForConditionalGeneration": TextPart("Qwen3_5MoeForCausalLM", ("model.visual.",)),
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", GEMMAS_OTHERS),
    "Gemma4ForConditionalGeneration": TextPart("Gemma4ForCausalLM", GEMMA4S_OTHERS),
    "Gemma4UnifiedForConditionalGeneration": TextPart("Gemma4UnifiedForCausalLM", GEMMA4S_OTHERS),
    "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM", GEMMAS_OTHERS, PLAIN_TEXTS),
    "LlavaForConditionalGeneration": TextPart("LlamaForCausalLM", GEMMAS_OTHERS, PLAIN_TEXTS),
    "Idefics3ForConditionalGeneration": TextPart("LlamaForCausalLM", IDEFICS_OTHERS, PLAIN_TEXTS),
    "SmolVLMForConditionalGeneration": TextPart("LlamaForCausalLM", IDEFICS_OTHERS, PLAIN_TEXTS),
}
"""The first entry of `architectures` in config.json -> its text."""

NAMES = (
    ("model", "lm_head"),
    ("model.language_model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),
    ("model.text_model", "lm_head"),
)
"""How checkpoints call the text without its head, and the head: as text alone, as transformers 5 and 4 save it, and as
Idefics does."""


def renamed(family: Family) -> list[Family]:
    """The same with the names that a checkpoint of text and others may have."""
    return [_with_names(family, body, head) for body, head in NAMES]


def _with_names(family: Family, body: str, head: str) -> Family:
    def longer(name: str) -> str:
        return f"{body}.{name.removeprefix('model.')}"

    return replace(with_body_names(family, longer), head=replace(family.head, name=head))
