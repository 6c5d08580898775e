"""Which checkpoints read pictures here, and why others, which do elsewhere, read text alone.

A picture is rows of embeddings in the prompt. That is all for networks that treat the tokens of a picture as those of
text: each attends to those before it, and positions count on by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight.checkpoint_files import CONFIG

READ = (
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
"""By the first entry of `architectures` in config.json."""
BOTH_WAYS = "the tokens of a picture attend to each other in both directions, which is not computed here"
GRIDS = "the tokens of a picture have positions in two dimensions, which are not computed here"
NOT_READ = {
    "Gemma3ForConditionalGeneration": BOTH_WAYS,
    "Gemma4ForConditionalGeneration": BOTH_WAYS,
    "Gemma4UnifiedForConditionalGeneration": BOTH_WAYS,
    "Qwen3_5ForConditionalGeneration": GRIDS,
    "Qwen3_5MoeForConditionalGeneration": GRIDS,
}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""One of which a checkpoint with pictures has."""
TEXT_ALONE = "this model reads text alone"


def why_text_alone(folder: Path) -> str:
    """A sentence about the checkpoint in `folder`; "" if it reads pictures, as far as its files tell."""
    architecture = _architecture(folder)
    if architecture in NOT_READ:
        return f"{TEXT_ALONE}: {NOT_READ[architecture]}"
    if architecture not in READ:
        return TEXT_ALONE
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return f"{TEXT_ALONE}: its checkpoint has no {PROCESSOR_FILES[0]}"
    return ""


def _architecture(folder: Path) -> str:
    try:
        values: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # whoever loads the model says so
        return ""
    found = values.get("architectures") if isinstance(values, dict) else None
    return str(found[0]) if isinstance(found, list) and found else ""
