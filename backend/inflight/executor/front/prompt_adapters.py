"""Prompt adapters: soft prompts that were trained with PEFT, kept by the caller's process and sent with its requests.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`, whose tensor `prompt_embeddings`
(virtual tokens, features) stands before the prompt. Weights are read from safetensors only.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, deserialize

from inflight.errors import InvalidRequest
from inflight.prompt_tuning import EmbeddingTable, EmbeddingType

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TENSOR = "prompt_embeddings"
KINDS = ("PROMPT_TUNING", "P_TUNING")
"""PEFT's types of adapters that are embeddings of virtual tokens and nothing else."""
MAX_BYTES = 64 * 2**20
"""Of a file of weights: more than any request may bring."""
_TYPES: dict[str, EmbeddingType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """The adapter that a request goes through."""

    adapter_name: str
    adapter_id: int
    """Of the program's choice, one for each adapter."""
    adapter_path: str = ""
    """Folder; needed the first time that the id is used."""


class PromptAdapters:
    """Those that were read, by their ids. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[int, tuple[str, EmbeddingTable]] = {}

    def load(self, request: PromptAdapterRequest) -> EmbeddingTable:
        """Its embeddings. Raises InvalidRequest if the folder holds none, or the id is another adapter's."""
        with self._lock:
            path, table = self._read.get(request.adapter_id, ("", None))
            if table is not None:
                if request.adapter_path not in ("", path):
                    raise InvalidRequest(f"prompt adapter id {request.adapter_id} is that of another adapter, {path}")
                return table
            if not request.adapter_path:
                raise InvalidRequest(
                    f"prompt adapter id {request.adapter_id} was not used before: give its adapter_path"
                )
            table = _read_adapter(Path(request.adapter_path))
            self._read[request.adapter_id] = (request.adapter_path, table)
            return table


def _read_adapter(folder: Path) -> EmbeddingTable:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("peft_type") if isinstance(config, dict) else None
        if kind not in KINDS:
            raise InvalidRequest(f"{path}: peft_type must be {' or '.join(KINDS)}, got {str(kind)[:40]!r}")
        path = folder / WEIGHTS
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_BYTES} bytes")
        tensors = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    except (OSError, ValueError, SafetensorError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from None
    tensor = tensors.get(TENSOR)
    if tensor is None or len(tensor["shape"]) != 2 or tensor["dtype"] not in _TYPES:
        raise InvalidRequest(f"{path} has no tensor {TENSOR} of two dimensions in float32, float16 or bfloat16")
    table = EmbeddingTable(
        dtype=_TYPES[tensor["dtype"]], shape=(tensor["shape"][0], tensor["shape"][1]), data=bytes(tensor["data"])
    )
    table.validate()
    return table
