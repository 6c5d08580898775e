"""What the files of the served checkpoint say of it, for clients that ask for a model's description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.asking.chat_template import read_json
from inflight.checkpoint_files import CONFIG, GGUF, GGUF_PARTS, MODULES

WEIGHTS = ("*.safetensors", GGUF, GGUF_PARTS)
TEXT = "text_config"
"""In config.json of a checkpoint of a text and others: the part of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    config: Mapping[str, Any]
    """config.json."""
    num_bytes: int
    """Of the files with weights; 0 = there are none here."""
    is_gguf: bool
    is_for_vectors: bool
    """Whether sentence-transformers' files say how its vectors are made."""

    @classmethod
    def read(cls, folder: Path) -> CheckpointFacts:
        """Raises ConfigurationError."""
        files = {path for pattern in WEIGHTS for path in folder.glob(pattern) if path.is_file()}
        return cls(
            config=read_json(folder / CONFIG),
            num_bytes=sum(path.stat().st_size for path in files),
            is_gguf=(folder / GGUF).is_file(),
            is_for_vectors=(folder / MODULES).is_file(),
        )

    @property
    def model_type(self) -> str:
        """Transformers' name of the network's kind, such as qwen3; "" = unknown."""
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""

    def size(self, name: str) -> int | None:
        """A number of config.json; None if it has none of this name."""
        text = self.config.get(TEXT)
        parts = (self.config, text if isinstance(text, dict) else {})
        return next((part[name] for part in parts if type(part.get(name)) is int), None)
