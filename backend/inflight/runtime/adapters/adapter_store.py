"""One rank's part of every adapter that the leader has sent, in host memory. Decides nothing: it follows orders."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight.lora import AdapterModule, AdapterOrders
from inflight.models.adapter_places import AdapterPlaces, Matrices

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class AdapterStore:
    """Used on the worker loop's thread, but for `fill`."""

    def __init__(self, places: AdapterPlaces, device: torch.device) -> None:
        self._places = places
        self._is_pinned = device.type == "cuda"
        self._parts: dict[int, dict[str, Matrices]] = {}

    def follow(self, orders: AdapterOrders) -> None:
        """Store what the leader sends, and drop what it drops."""
        for uid in orders.dropped:
            self._parts.pop(uid, None)
        for part in orders.parts:
            stored = self._parts.setdefault(part.uid, {})
            for module in part.modules:
                if self._places.places[module.name].slots is not None:
                    stored[module.name] = self._own_part(module)

    def find(self, uid: int) -> Mapping[str, Matrices]:
        """This rank's part of an adapter by names of layers. Raises ValueError if it is not stored."""
        if uid not in self._parts:
            raise ValueError(f"adapter {uid} is not stored")
        return self._parts[uid]

    def fill(self, slot: int, parts: Mapping[str, Matrices]) -> None:
        """Put an adapter into a slot of the device. Where steps run, between two of them."""
        self._places.fill(slot, parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _own_part(self, module: AdapterModule) -> Matrices:
        place = self._places.places[module.name]
        a = _matrix(module.a, module.dtype, module.rank)
        b = _matrix(module.b, module.dtype, place.num_outputs)
        a, b = place.part(a, b.float() * module.scale)
        return self._kept(a), self._kept(b)

    def _kept(self, matrix: Tensor) -> Tensor:
        """A copy in the network's type that can be copied to the device without waiting."""
        copy = torch.empty(matrix.shape, dtype=self._places.dtype, pin_memory=self._is_pinned)
        return copy.copy_(matrix)


def _matrix(data: bytes, dtype: str, num_rows: int) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(num_rows, -1)
