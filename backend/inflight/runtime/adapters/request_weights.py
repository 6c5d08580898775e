"""Reads an adapter from a request's tensors, in TensorRT-LLM's layout (see LoraConfig)."""

from __future__ import annotations

import torch

from inflight.errors import InvalidRequest
from inflight.lora import LoraConfig
from inflight.models.adapter_places import AdapterPlaces
from inflight.runtime.adapters.adapter_weights import AdapterWeights, make_module


def read_request_weights(config: LoraConfig, places: AdapterPlaces) -> AdapterWeights:
    """Raises InvalidRequest, with one sentence, if it does not fit the network."""
    what = f"LoRA task {config.task_id}"
    rows = torch.from_numpy(config.rows().copy())
    modules = []
    seen: set[str] = set()
    for row, (module, layer, rank) in zip(rows, config.config, strict=True):
        name = places.numbered.get((module, layer))
        if name is None:
            raise InvalidRequest(f"{what}: lora_config names module {module} of layer {layer}, which the network lacks")
        if name in seen:
            raise InvalidRequest(f"{what}: lora_config names module {module} of layer {layer} twice")
        seen.add(name)
        place = places.places[name]
        if not 1 <= rank <= places.max_rank or rank * (place.num_inputs + place.num_outputs) > len(row):
            raise InvalidRequest(
                f"{what}: module {module} of layer {layer} has rank {rank}, but it must be 1 to "
                f"lora_cache_max_adapter_size {places.max_rank}, and a row of lora_weights has {len(row)} elements for "
                f"rank * {place.num_inputs + place.num_outputs}"
            )
        border, end = rank * place.num_inputs, rank * (place.num_inputs + place.num_outputs)
        a, b = row[:border].view(rank, place.num_inputs), row[border:end].view(place.num_outputs, rank)
        modules.append(make_module(places, what, name, a, b, scale=1.0))
    return AdapterWeights.of(sorted(modules, key=lambda each: each.name))
