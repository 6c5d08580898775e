"""An adapter as it was read, from a folder or from a request, and the checks that both share.

Legend: r rank of the adapter, I input and O output features of a layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.errors import InvalidRequest
from inflight.lora import AdapterModule
from inflight.models.adapter_places import AdapterPlaces

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    modules: tuple[AdapterModule, ...]
    digest: bytes

    @classmethod
    def of(cls, modules: Sequence[AdapterModule]) -> AdapterWeights:
        digest = hashlib.sha256()
        for module in modules:
            head = (module.name, module.rank, module.scale, module.dtype, len(module.a), len(module.b))
            digest.update(repr(head).encode())
            digest.update(module.a)
            digest.update(module.b)
        return cls(tuple(modules), digest.digest())

    @property
    def num_bytes(self) -> int:
        return sum(module.num_bytes for module in self.modules)


def make_module(places: AdapterPlaces, what: str, name: str, a: Tensor, b: Tensor, scale: float) -> AdapterModule:
    """The part for the layer `name`, which must be one of `places`, of A (r, I) and B (O, r).

    `what`: how messages call the adapter. Raises InvalidRequest if it does not fit the network."""
    place = places.places[name]
    rank = a.shape[0] if a.dim() == 2 else 0
    if not 1 <= rank <= places.max_rank:
        raise InvalidRequest(
            f"{what}: the rank of {name} is {rank}, but this engine takes 1 to lora_cache_max_adapter_size "
            f"{places.max_rank}"
        )
    if a.shape != (rank, place.num_inputs) or b.shape != (place.num_outputs, rank):
        raise InvalidRequest(
            f"{what}: the matrices of {name} are {list(a.shape)} and {list(b.shape)}, but the network asks for "
            f"[{rank}, {place.num_inputs}] and [{place.num_outputs}, {rank}]"
        )
    if a.dtype not in NAMES or b.dtype != a.dtype:
        raise InvalidRequest(f"{what}: the matrices of {name} must both be float32, float16 or bfloat16")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise InvalidRequest(f"{what}: the matrices of {name} hold numbers that are not finite")
    dtype = NAMES[a.dtype]
    return AdapterModule(name, rank, scale, dtype, _bytes(a), _bytes(b))  # type: ignore[arg-type]


def _bytes(matrix: Tensor) -> bytes:
    data: bytes = matrix.contiguous().view(torch.uint8).numpy().tobytes()
    return data
