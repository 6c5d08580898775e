"""How many adapters a rank's device holds at once, and the memory for them. Done once, before the KV cache is made."""

from __future__ import annotations

import logging

import torch

from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import InsufficientMemory
from inflight.models.adapter_places import AdapterPlaces
from inflight.runtime.device import free_memory, gib

logger = logging.getLogger(__name__)


def allocate_adapters(
    config: EngineConfig, places: AdapterPlaces, groups: ParallelGroups, dtype: torch.dtype, device: torch.device
) -> None:
    """Allocate as many slots as `max_loras` and the memory allow, equally many on every rank. Collective.

    Raises InsufficientMemory if there is no room for one."""
    if not places.places:
        logger.warning("no LoRA adapters are served: the network has no linear layers that take any")
        return
    max_rank, wanted = config.lora_cache_max_adapter_size, config.max_loras or config.max_batch_size
    slot_bytes = places.slot_bytes(max_rank, dtype)
    free_bytes = free_memory(device, config.num_ranks)
    fraction = config.lora_cache_gpu_memory_fraction or 1.0
    num_slots = groups.all_reduce_min(min(wanted, int(fraction * free_bytes) // slot_bytes))
    if num_slots < 1 or (num_slots < wanted and not config.lora_cache_gpu_memory_fraction):
        raise InsufficientMemory(
            f"max_loras {wanted} takes {gib(wanted * slot_bytes)} of memory in each rank, for adapters of rank "
            f"{max_rank}, but {gib(int(fraction * free_bytes))} may be used; lower max_loras or "
            "lora_cache_max_adapter_size, raise lora_cache_gpu_memory_fraction, or free memory"
        )
    places.allocate(num_slots, max_rank, dtype, device)
    logger.info(
        "%d LoRA adapters of up to rank %d run at once, in %s", num_slots, max_rank, gib(num_slots * slot_bytes)
    )
