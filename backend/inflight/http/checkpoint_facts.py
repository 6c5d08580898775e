"""What the files of the served checkpoint say of it, for clients that ask for a model's description."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inflight.asking.chat_template import read_json
from inflight.checkpoint_files import CONFIG, GGUF, GGUF_PARTS, MODULES

WEIGHTS = ("*.safetensors", GGUF, GGUF_PARTS)
MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as its format says."""
NUMBERS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Types of which each value is one of the network's."""
PACKED = frozenset({"U8", "I8", "U16", "I16", "U32", "I32", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"})
"""Types of codes, of which several may be in one, and of their scales. Others count places, and are no parameters."""
TEXT = "text_config"
"""In config.json of a checkpoint of a text and others: the part of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    config: Mapping[str, Any]
    """config.json."""
    num_bytes: int
    """Of the files with weights; 0 = there are none here."""
    num_parameters: int | None
    """Values of the network; None = unknown, as where a file packs several into one number."""
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
            num_parameters=count_parameters([path for path in files if path.suffix == ".safetensors"]),
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


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]


def count_parameters(files: Sequence[Path]) -> int | None:
    """Of safetensors files, read from their headers alone; None = there are none, one is none, or holds codes."""
    count = 0
    for path in files:
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > MAX_HEADER_BYTES:
                    return None
                entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            tensors = [msgspec.json.decode(entry, type=_Tensor) for entry in entries.values()]
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if any(tensor.dtype in PACKED for tensor in tensors):
            return None
        count += sum(math.prod(tensor.shape) for tensor in tensors if tensor.dtype in NUMBERS)
    return count or None
