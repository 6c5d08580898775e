"""Which part of an engine's work each rank does: from a world rank to its coordinates and to the groups it belongs to.

A rank has three coordinates. Ranks are numbered with the tensor-parallel rank fastest, then the pipeline stage, then
the data-parallel replica: the ranks that exchange the most are neighbours, which launchers place on one machine.

    world rank = tensor_parallel_rank + tp * (pipeline_stage + pp * data_parallel_replica)

For tp = 2, pp = 2, dp = 2:

    replica            0           1
    stage           0     1     0     1
    world ranks    0 1   2 3   4 5   6 7

Expert parallelism would be a fourth coordinate, split off from the ranks of one pipeline stage; how those are shared
between tensors and experts is not decided here yet. Knows no communication and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where one rank stands; each counts from 0."""

    tensor_parallel_rank: int
    """Which part of every layer it holds."""
    pipeline_stage: int
    """Which consecutive layers it holds."""
    data_parallel_replica: int
    """Which copy of the whole model it belongs to."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """The ranks of one engine: `tp` ranks share each layer, `pp` stages share the layers, `dp` replicas the requests.

    A rank is always a world rank, 0 to `size` - 1; it is the caller's error if it is not. Groups are in rank order.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for a size below 1."""
        for name, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")

    @classmethod
    def of(cls, config: EngineConfig) -> Mapping:
        """The mapping that a configuration asks for."""
        return cls(config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def first_rank_of_last_stage(self) -> int:
        """Of the first replica: the first of the ranks that sample."""
        return self.tp * (self.pp - 1)

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.size
        upper, tensor_parallel_rank = divmod(rank, self.tp)
        data_parallel_replica, pipeline_stage = divmod(upper, self.pp)
        return Coordinates(
            tensor_parallel_rank=tensor_parallel_rank,
            pipeline_stage=pipeline_stage,
            data_parallel_replica=data_parallel_replica,
        )

    def rank_at(self, coordinates: Coordinates) -> int:
        """The inverse of `coordinates`."""
        upper = coordinates.pipeline_stage + self.pp * coordinates.data_parallel_replica
        return coordinates.tensor_parallel_rank + self.tp * upper

    def tensor_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the parts of the same layers as `rank`, itself included."""
        first = rank - self.coordinates(rank).tensor_parallel_rank
        return tuple(range(first, first + self.tp))

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part of the other stages' layers, itself included, from the first stage on."""
        first = rank - self.tp * self.coordinates(rank).pipeline_stage
        return tuple(range(first, first + self.tp * self.pp, self.tp))

    def data_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same weights in each replica, itself included."""
        return tuple(range(rank % (self.tp * self.pp), self.size, self.tp * self.pp))
