"""What one rank has of adapters."""

from __future__ import annotations

import torch

from inflight.config import EngineConfig
from inflight.models.adapter_places import AdapterPlaces
from inflight.runtime.adapters.adapter_library import AdapterLibrary
from inflight.runtime.adapters.adapter_reader import AdapterReader
from inflight.runtime.adapters.adapter_store import AdapterStore


def open_adapters(
    config: EngineConfig, places: AdapterPlaces, device: torch.device, *, is_leader: bool
) -> tuple[AdapterStore | None, AdapterLibrary | None]:
    """What this rank stores of adapters and, on the leader, which there are; nothing if none is served.

    `places`: the layers of its network that adapters change.
    """
    if not places.num_slots:
        return None, None
    store = AdapterStore(places, device)
    if not is_leader:
        return store, None
    host_bytes = config.lora_cache_host_memory_bytes
    reader = AdapterReader(places, lora_dir=config.lora_dir, max_bytes=host_bytes)
    return store, AdapterLibrary(reader, host_bytes=host_bytes)
