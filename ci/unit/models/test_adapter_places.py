"""Which part of an adapter's matrices a rank holds: all ranks together the whole, however layers are stacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.models.adapter_places import DOWN, GATE, KEY, OUTPUT, QUERY, UP, VALUE, AdapterPlaces
from inflight.models.config_file import ConfigValues
from inflight.models.families import llama, mixtral, phi3
from inflight.models.formats.format import Block
from inflight.models.split_tensors import SplitByOutputs
from inflight.models.weights import Section, WeightLoader, _rows

NUM_INPUTS, RANK, RANKS = 12, 3, 2
SIZES = (8, 4, 4)
"""Queries, keys, values."""


def loader(places: AdapterPlaces) -> WeightLoader:
    nothing: Any = None
    return WeightLoader(nothing, nothing, nothing, torch.float32, torch.device("cpu"), places)


def blocks(names: tuple[str, ...], rank: int) -> list[Block]:
    """Of a product split by outputs."""
    sections = [Section(size, rank * size // RANKS, size // RANKS) for size in SIZES]
    return [
        Block(name=name, num_outputs=outputs, num_inputs=NUM_INPUTS, outputs=rows, inputs=range(NUM_INPUTS))
        for name, outputs, rows in _rows(SplitByOutputs(names), sections)
    ]


def matrices(num_outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(RANK, NUM_INPUTS, generator=generator)
    return a, torch.randn(num_outputs, RANK, generator=generator)


@pytest.mark.parametrize("names", [("q", "k", "v"), ("qkv",)])
def test_each_rank_has_its_outputs_of_every_section(names: tuple[str, ...]) -> None:
    x = torch.randn(5, NUM_INPUTS, generator=torch.Generator().manual_seed(9))
    outputs = dict(zip(names, SIZES, strict=True)) if len(names) > 1 else {"qkv": sum(SIZES)}
    whole = {name: matrices(size, seed) for seed, (name, size) in enumerate(outputs.items())}
    expected = torch.cat([x @ a.T @ b.T for a, b in whole.values()], dim=1).split(SIZES, dim=1)
    of_ranks = []
    for rank in range(RANKS):
        places = AdapterPlaces()
        slots = loader(places)._adapters_of(blocks(names, rank))
        assert slots is not None and places.slots == [slots]
        places.allocate(2, 8, torch.float32, torch.device("cpu"))
        places.fill(1, {name: places.places[name].part(*pair) for name, pair in whole.items()})
        metadata: Any = type("Metadata", (), {"adapters_T": torch.tensor([1, -1, 1, 1, -1], dtype=torch.int32)})
        of_ranks.append(slots.add(torch.zeros(5, sum(SIZES) // RANKS), x, metadata))
    parts = [of_rank.split([size // RANKS for size in SIZES], dim=1) for of_rank in of_ranks]
    for section, wanted in enumerate(expected):
        found = torch.cat([of_rank[section] for of_rank in parts], dim=1)
        torch.testing.assert_close(found[[0, 2, 3]], wanted[[0, 2, 3]])
        assert not found[[1, 4]].any()


def test_the_products_of_ranks_that_share_the_inputs_sum_to_the_whole() -> None:
    x = torch.randn(4, NUM_INPUTS, generator=torch.Generator().manual_seed(9))
    a, b = matrices(10, 1)
    total = torch.zeros(4, 10)
    for rank in range(RANKS):
        inputs = range(rank * NUM_INPUTS // RANKS, (rank + 1) * NUM_INPUTS // RANKS)
        places = AdapterPlaces()
        block = Block(name="o", num_outputs=10, num_inputs=NUM_INPUTS, outputs=range(10), inputs=inputs)
        slots = loader(places)._adapters_of([block])
        assert slots is not None
        places.allocate(1, 4, torch.float32, torch.device("cpu"))
        places.fill(0, {"o": places.places["o"].part(a, b)})
        metadata: Any = type("Metadata", (), {"adapters_T": torch.zeros(4, dtype=torch.int32)})
        total += slots.add(torch.zeros(4, 10), x[:, inputs.start : inputs.stop].contiguous(), metadata)
    torch.testing.assert_close(total, x @ a.T @ b.T)


def test_a_slot_holds_nothing_of_the_adapter_before() -> None:
    places = AdapterPlaces()
    slots = loader(places)._adapters_of(blocks(("q", "k", "v"), 0))
    assert slots is not None
    places.allocate(1, 8, torch.float32, torch.device("cpu"))
    places.fill(
        0, {name: places.places[name].part(*matrices(size, 1)) for name, size in zip("qkv", SIZES, strict=True)}
    )
    a, b = matrices(SIZES[1], 2)
    places.fill(0, {"k": places.places["k"].part(a[:1], b[:, :1])})
    x = torch.randn(3, NUM_INPUTS, generator=torch.Generator().manual_seed(9))
    metadata: Any = type("Metadata", (), {"adapters_T": torch.zeros(3, dtype=torch.int32)})
    found = slots.add(torch.zeros(3, sum(SIZES) // 2), x, metadata)
    torch.testing.assert_close(found[:, 4:6], (x @ a[:1].T @ b[:, :1].T)[:, :2])
    assert not found[:, :4].any() and not found[:, 6:].any()


def test_modules_have_tensorrt_llms_numbers(tmp_path: Any) -> None:
    config = ConfigValues(tmp_path, {"rms_norm_eps": 1e-6})
    stacked, separate = AdapterPlaces(), AdapterPlaces()
    stacked.number(phi3.describe(config), 4)
    separate.number(llama.describe(config), 4)
    assert {number: name.removeprefix("model.layers.4.") for (number, _), name in stacked.numbered.items()} == {
        0: "self_attn.qkv_proj",
        4: "self_attn.o_proj",
        18: "mlp.gate_up_proj",
        6: "mlp.down_proj",
    }
    assert {number: name.removeprefix("model.layers.4.") for (number, _), name in separate.numbered.items()} == {
        1: "self_attn.q_proj",
        2: "self_attn.k_proj",
        3: "self_attn.v_proj",
        4: "self_attn.o_proj",
        5: "mlp.gate_proj",
        7: "mlp.up_proj",
        6: "mlp.down_proj",
    }


def test_a_mixture_of_experts_has_no_number() -> None:
    values: dict[str, Any] = {
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
    }
    family = mixtral.describe(ConfigValues(Path("config.json"), values))
    places = AdapterPlaces()
    places.number(family, 0)
    assert {module for module, _ in places.numbered} == {QUERY, KEY, VALUE, OUTPUT}
    places.number(replace(family, experts=None), 0)
    assert {module for module, _ in places.numbered} == {QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN}
