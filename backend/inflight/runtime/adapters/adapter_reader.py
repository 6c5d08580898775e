"""How the leader reads adapters: from which folders, and for which network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.lora import LoraConfig, LoRARequest
from inflight.models.adapter_places import AdapterPlaces
from inflight.runtime.adapters.adapter_weights import AdapterWeights
from inflight.runtime.adapters.peft_folder import find_folder, read_peft_folder
from inflight.runtime.adapters.request_weights import read_request_weights


class AdapterReader:
    def __init__(self, places: AdapterPlaces, *, lora_dir: str, max_bytes: int) -> None:
        """`lora_dir`: folder with those that clients may name; empty = none. `max_bytes`: of one adapter. Raises
        ConfigurationError if there is no such folder."""
        if lora_dir and not Path(lora_dir).is_dir():
            raise ConfigurationError(f"lora_dir: {lora_dir} is not a folder; set it to the one that holds the adapters")
        self._places = places
        self._lora_dir = lora_dir
        self._max_bytes = max_bytes

    def of_name(self, request: LoRARequest) -> Callable[[], AdapterWeights]:
        """What reads that adapter, which may take long. Raises InvalidRequest if there is none, now or when called."""
        folder, within = find_folder(request, self._lora_dir)
        return partial(read_peft_folder, request.lora_name, folder, within, self._places, self._max_bytes)

    def of_tensors(self, config: LoraConfig) -> Callable[[], AdapterWeights]:
        """The same for a request's own tensors."""
        return partial(read_request_weights, config, self._places)
