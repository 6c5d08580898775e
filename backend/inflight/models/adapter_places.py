"""Where a network takes low-rank adapters: which layers of a checkpoint, and which part of their matrices a rank holds.

Filled while the network is composed, so nothing here knows architectures. Legend: I input features, O output features
of a whole layer, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight.layers.lora import LoraSlots
from inflight.models.family import Family

QKV, QUERY, KEY, VALUE, OUTPUT, GATE, DOWN, UP, GATE_UP = 0, 1, 2, 3, 4, 5, 6, 7, 18
"""TensorRT-LLM's numbers of the modules that an adapter changes: attn_qkv, attn_q, attn_k, attn_v, attn_dense,
mlp_h_to_4h (what goes through the activation), mlp_4h_to_h, mlp_gate, mlp_gate_up."""

Matrices = tuple[Tensor, Tensor]
"""A (r, I) and B (O, r), the scale in B: of a whole layer, or a rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlace:
    """One layer of the checkpoint."""

    num_inputs: int
    num_outputs: int
    inputs: range
    """Columns of A that this rank holds."""
    outputs: tuple[range, ...]
    """Rows of B that this rank holds, in the order in which it holds them."""
    slots: LoraSlots | None
    """None = another pipeline stage has the layer."""
    index: int
    """Which of the layers that are stacked in `slots`."""

    def part(self, a: Tensor, b: Tensor) -> Matrices:
        """This rank's part of a layer's matrices."""
        return a[:, self.inputs.start : self.inputs.stop], torch.cat(
            [b[rows.start : rows.stop] for rows in self.outputs]
        )


@dataclass(slots=True)
class AdapterPlaces:
    """Of one rank's network. Empty for a network that takes no adapters."""

    places: dict[str, AdapterPlace] = field(default_factory=dict)
    """By the name of the layer's tensors in the checkpoint, without ending."""
    numbered: dict[tuple[int, int], str] = field(default_factory=dict)
    """The same names, by TensorRT-LLM's number of the module and the number of the layer."""
    prefix: str = ""
    """What an adapter's names begin with, and those of a checkpoint that was saved without its head do not."""
    num_slots: int = 0
    max_rank: int = 0
    dtype: torch.dtype = torch.float32
    """Of the network's activations, and of the matrices."""

    @property
    def slots(self) -> list[LoraSlots]:
        """Each once."""
        own = [place.slots for place in self.places.values() if place.slots is not None]
        return list({id(slots): slots for slots in own}.values())

    def add(self, name: str, place: AdapterPlace) -> None:
        self.places[f"{self.prefix}{name}"] = place

    def number(self, family: Family, layer: int) -> None:
        """Note TensorRT-LLM's numbers of a layer's modules. A mixture of experts has none, nor has what stands in place
        of attention."""
        numbers: dict[int, str] = {}
        if family.attends(layer):
            numbers[OUTPUT] = family.attention.output.name
            if family.attention.latents is None:
                qkv = tuple(dict.fromkeys(family.qkv(layer).names))
                is_stacked = len(set(family.attention.qkv.names)) == 1
                numbers |= dict(zip((QKV,) if is_stacked else (QUERY, KEY, VALUE), qkv, strict=False))
        experts = family.experts
        has_mlp = experts is None or experts.beside is not None or layer not in experts.layers
        if family.feeds_forward(layer) and has_mlp:
            gate_up = family.mlp.gate_up.names
            numbers |= dict(zip((GATE, UP) if len(gate_up) > 1 else (GATE_UP,), gate_up, strict=True))
            numbers[DOWN] = family.mlp.down.name
        self.numbered |= {
            (module, layer): f"{self.prefix}{family.layers}.{layer}.{name}" for module, name in numbers.items()
        }

    def slot_bytes(self, max_rank: int, dtype: torch.dtype) -> int:
        """Memory of one slot of all layers."""
        return sum(slots.num_elements(max_rank) for slots in self.slots) * dtype.itemsize

    def allocate(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Memory for `num_slots` adapters of at most `max_rank`."""
        self.num_slots, self.max_rank, self.dtype = num_slots, max_rank, dtype
        for slots in self.slots:
            slots.allocate(num_slots, max_rank, dtype, device)

    def fill(self, slot: int, parts: Mapping[str, Matrices]) -> None:
        """Put an adapter into a slot: this rank's `parts` of its matrices, by the names of layers."""
        by_slots: dict[int, dict[int, Matrices]] = {}
        for name, matrices in parts.items():
            place = self.places[name]
            by_slots.setdefault(id(place.slots), {})[place.index] = matrices
        for slots in self.slots:
            slots.fill(slot, by_slots.get(id(slots), {}))
