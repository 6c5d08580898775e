"""Fetches models from a hub on loopback, to a cache of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import LoopbackHub

from inflight.errors import ConfigurationError
from inflight.hub.client import Hub
from inflight.hub.fetch import fetch
from inflight.hub.model_name import ModelName

NAME = "org/model"
WEIGHTS = hashlib.shake_128(b"weights").digest(300_000)
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors": WEIGHTS,
}
UNREAD = {
    "README.md": b"# A model",
    "pytorch_model.bin": WEIGHTS,
    "modeling_own.py": b"import os",
    "vocabulary.py": b"import os",
    "original/params.json": b"{}",
    "consolidated.safetensors": WEIGHTS,
}


class Fetcher:
    """Fetches to a cache of its own, without waiting between attempts."""

    def __init__(self, hub: LoopbackHub, cache: Path) -> None:
        self.hub = hub
        self.cache = cache
        self.told: list[str] = []
        self.checked: list[list[str]] = []
        """What was there when the check was asked."""

    def fetch(self, name: str = NAME, check: Callable[[Path], None] | None = None, **options: Any) -> Path:
        model = ModelName.parse(name)
        assert model is not None
        usual: dict[str, Any] = {"endpoint": self.hub.endpoint, "cache": self.cache, "patience": 0.0, "timeout": 5.0}
        return fetch(model, Hub(**usual | options), check or self.check, self.told.append)

    def check(self, folder: Path) -> None:
        self.checked.append(sorted(path.name for path in folder.iterdir()))

    def refusal(self, name: str = NAME, **options: Any) -> str:
        with pytest.raises(ConfigurationError) as caught:
            self.fetch(name, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(self.hub.endpoint, "HUB")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
