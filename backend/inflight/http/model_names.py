"""The names that `model` of a request may have: the engine's own, and those of LoRA adapters.

Adapters are the folders in lora_dir, and those that clients have loaded here, where the operator allows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import InvalidRequest
from inflight.http.api_error import APIError
from inflight.lora import LoRARequest
from inflight.text.safe_text import safe_text

CONFIG = "adapter_config.json"
"""PEFT's, in each adapter's folder."""
OWNER = "inflight"


class ModelNames:
    def __init__(self, names: list[str], checkpoint: str, lora_dir: str, others: Sequence[str] = ()) -> None:
        """`names`: of the engine, the one that answers have first. `lora_dir`: "" if there is none. `others`: names of
        the server's other models."""
        self._names = names
        self._others = others
        self._checkpoint = checkpoint
        self._lora_dir = Path(lora_dir) if lora_dir else None
        self._loaded: dict[str, str] = {}
        """Name -> folder of adapters that clients have loaded."""
        self._created = int(time.time())

    def find(self, model: str | None) -> tuple[str, LoRARequest | None]:
        """The name that the answer repeats, and the adapter. Raises APIError for an unknown name."""
        if model is None or model in self._names:
            return model or self._names[0], None
        if model in self._loaded:
            # With its folder: the engine may have dropped it, or was launched again.
            return model, LoRARequest(model, 0, self._loaded[model])
        if self._has_folder(model):
            return model, LoRARequest(model)
        raise self._unknown(model)

    @property
    def instead(self) -> str:
        """What an error about an unknown name says that there is; "" where there is one model."""
        return f": this server has {', '.join([*self._names, *self._others])}" if self._others else ""

    def knows(self, model: str) -> bool:
        """Whether `find` finds it."""
        return model in self._names or self.is_adapter(model)

    @property
    def first(self) -> str:
        """The name of the engine's model that answers have."""
        return self._names[0]

    def is_adapter(self, name: str) -> bool:
        return name in self._loaded or self._has_folder(name)

    def is_loaded(self, name: str) -> bool:
        """Whether a client has loaded it."""
        return name in self._loaded

    def add(self, adapter: LoRARequest) -> None:
        self._loaded[adapter.lora_name] = adapter.lora_path

    def remove(self, name: str) -> None:
        self._loaded.pop(name, None)

    def check_free(self, name: str) -> None:
        """Raise APIError if `name` stands for something already, or can be no adapter's."""
        try:
            LoRARequest(name).validate()
        except InvalidRequest as error:
            raise APIError(400, str(error), param="lora_name") from None
        if name in self._others or self.knows(name):
            raise APIError(400, f"the model {name} exists already", param="lora_name")

    def cards(self, max_model_len: int | None, pooled: str = "") -> list[dict[str, Any]]:
        """As /v1/models lists them. `pooled`: what an engine gives that generates nothing, see RequestLimits."""
        own = [self._card(name, self._checkpoint, None, max_model_len) for name in self._names]
        folders = {**{name: str(path) for name, path in self._folders().items()}, **self._loaded}
        cards = own + [self._card(name, path, self._names[0], max_model_len) for name, path in sorted(folders.items())]
        return [{**card, "pooled": pooled} for card in cards] if pooled else cards

    def _card(self, name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
        # The last part alone: where files lie on this machine concerns no client.
        card = {"id": name, "object": "model", "created": self._created, "owned_by": OWNER, "root": Path(root).name}
        return {**card, "parent": parent, "max_model_len": max_model_len}

    def _unknown(self, model: str) -> APIError:
        message = f"The model `{safe_text(model)}` does not exist{self.instead}."
        return APIError(404, message, param="model", code="model_not_found")

    def _has_folder(self, name: str) -> bool:
        """Opens nothing, so that requests are answered even if this process may open no more files."""
        if self._lora_dir is None or name in ("", os.curdir, os.pardir) or os.sep in name:
            return False
        return os.path.isfile(self._lora_dir / name / CONFIG)

    def _folders(self) -> dict[str, Path]:
        if self._lora_dir is None or not self._lora_dir.is_dir():
            return {}
        return {folder.name: folder for folder in self._lora_dir.iterdir() if (folder / CONFIG).is_file()}
