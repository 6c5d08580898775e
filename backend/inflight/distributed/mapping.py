"""Which part of a replica's work each rank does: from a world rank to its coordinates and to the groups it belongs to.

A rank has two coordinates. Ranks are numbered with the tensor-parallel rank fastest, then the pipeline stage: the ranks
that exchange the most are neighbours, which launchers place on one machine.

    world rank = tensor_parallel_rank + tp * pipeline_stage

For tp = 2, pp = 2:

    stage           0     1
    world ranks    0 1   2 3

Data-parallel replicas of an engine are no third coordinate: each is a launch of its own, with a leader, a scheduler and
a KV cache, and its ranks know nothing of the others. Their front shares the requests (executor/front/routing.py).

Nor are experts: the ranks that share a layer share its experts too, which `moe_expert_parallel_size` divides among them
in turn (WeightLoader.experts_of_rank). Knows no communication and no tensors.
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


@dataclass(frozen=True, slots=True)
class Mapping:
    """The ranks of one replica: `tp` ranks share each layer, `pp` stages share the layers.

    A rank is always a world rank, 0 to `size` - 1; it is the caller's error if it is not. Groups are in rank order.
    """

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for a size below 1."""
        for name, size in (("tp", self.tp), ("pp", self.pp)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")

    @classmethod
    def of(cls, config: EngineConfig) -> Mapping:
        """The mapping that a configuration asks for."""
        return cls(config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    @property
    def first_rank_of_last_stage(self) -> int:
        """The first of the ranks that sample."""
        return self.tp * (self.pp - 1)

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.size
        pipeline_stage, tensor_parallel_rank = divmod(rank, self.tp)
        return Coordinates(tensor_parallel_rank=tensor_parallel_rank, pipeline_stage=pipeline_stage)

    def tensor_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the parts of the same layers as `rank`, itself included."""
        first = rank - self.coordinates(rank).tensor_parallel_rank
        return tuple(range(first, first + self.tp))

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part of the other stages' layers, itself included, from the first stage on."""
        first = rank - self.tp * self.coordinates(rank).pipeline_stage
        return tuple(range(first, first + self.tp * self.pp, self.tp))
