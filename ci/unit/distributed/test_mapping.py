"""Mapping: ranks and coordinates are one to one, and the groups of each kind split the ranks without a remainder.

Run: pytest ci/unit/distributed/test_mapping.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.distributed.mapping import Coordinates, Mapping

mappings = st.builds(Mapping, st.integers(1, 6), st.integers(1, 6))

GROUPS: dict[str, Callable[[Mapping, int], tuple[int, ...]]] = {
    "tensor_parallel_rank": Mapping.tensor_parallel_ranks,
    "pipeline_stage": Mapping.pipeline_ranks,
}
"""Coordinate -> the group whose ranks differ in nothing but this coordinate."""


def as_tuple(coordinates: Coordinates) -> tuple[int, int]:
    """Slowest coordinate first, as ranks are numbered."""
    return coordinates.pipeline_stage, coordinates.tensor_parallel_rank


@given(mappings)
def test_ranks_count_through_the_coordinates_with_the_tensor_parallel_rank_fastest(mapping: Mapping) -> None:
    every = [(p, t) for p in range(mapping.pp) for t in range(mapping.tp)]
    assert [as_tuple(mapping.coordinates(rank)) for rank in range(mapping.size)] == every


@pytest.mark.parametrize("coordinate", GROUPS)
@given(mappings)
def test_a_group_differs_in_one_coordinate_and_is_in_its_order(coordinate: str, mapping: Mapping) -> None:
    for rank in range(mapping.size):
        group = GROUPS[coordinate](mapping, rank)
        assert rank in group
        places = [mapping.coordinates(member) for member in group]
        assert [getattr(place, coordinate) for place in places] == list(range(len(group)))
        for other in GROUPS.keys() - {coordinate}:
            assert {getattr(place, other) for place in places} == {getattr(mapping.coordinates(rank), other)}


@pytest.mark.parametrize("coordinate", GROUPS)
@given(mappings)
def test_every_rank_is_in_exactly_one_group_of_a_kind(coordinate: str, mapping: Mapping) -> None:
    groups = {GROUPS[coordinate](mapping, rank) for rank in range(mapping.size)}
    assert Counter(rank for group in groups for rank in group) == Counter(range(mapping.size))


def test_the_example_of_the_docstring() -> None:
    mapping = Mapping(2, 2)
    assert mapping.tensor_parallel_ranks(3) == (2, 3)
    assert mapping.pipeline_ranks(3) == (1, 3)


@pytest.mark.parametrize("sizes", [(0, 1), (1, -1)])
def test_a_size_below_one_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Mapping(*sizes)


def test_a_configuration_gives_its_mapping() -> None:
    config = EngineConfig(tensor_parallel_size=4, data_parallel_size=2)
    assert Mapping.of(config) == Mapping(4, 1)
    assert Mapping.of(config).size == config.num_replica_ranks == 4
