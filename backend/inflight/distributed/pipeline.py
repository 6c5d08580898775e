"""What the stages of one pipeline tell each other: hidden states go forward, a step's results go back to all.

    stage 0 ── hidden states ──> stage 1 ── hidden states ──> stage 2
       ^                            ^                            │
       └────────────────────────────┴───────── results ──────────┘

PipelineGroup          one stage: nothing to exchange
LinkedPipelineGroup    CPU ranks: everything goes through sockets (stage_links.py)
NcclPipelineGroup      GPU ranks: hidden states go from one GPU to the next, results through sockets

With tensor parallelism each stage has several ranks, which compute equal hidden states and results. The ranks with the
same part of every layer are a pipeline of their own. Knows no network and no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from inflight.distributed.mapping import Mapping
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.stage_links import Buffer, StageLink, connect_stages
from inflight.distributed.torch_groups import TorchGroups


class PipelineGroup:
    """A pipeline of one stage. Every stage sends as often as the next one receives, in the same order."""

    stage = 0
    """This rank's, from 0."""
    size = 1
    """Number of stages."""

    @staticmethod
    def create(
        rank_group: RankGroup, mapping: Mapping, device: torch.device, torch_groups: TorchGroups
    ) -> PipelineGroup:
        """Connect the ranks of this rank's pipeline; `device` is its own. Collective over `rank_group`, whose world
        ranks `mapping` describes. `torch_groups`: of the same ranks; joined on GPUs."""
        if mapping.pp == 1:
            return PipelineGroup()
        ranks = mapping.pipeline_ranks(rank_group.rank)
        links = connect_stages(rank_group, ranks)
        if device.type == "cuda":
            torch_groups.join()
            return NcclPipelineGroup(rank_group.rank, ranks, links)
        return LinkedPipelineGroup(rank_group.rank, ranks, links)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.size - 1

    def send(self, x: Tensor) -> None:
        """Give `x` to the next stage, which receives it with the shape and dtype that it expects."""
        raise AssertionError("there is no next stage")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the stage before has sent. On a CPU it waits, asleep; raises ConnectionError if that stage is gone."""
        raise AssertionError("there is no stage before this one")

    def publish(self, result: Buffer) -> None:
        """Tell all other stages the result of a step. In the last stage only."""

    def next_result(self) -> Future[bytearray]:
        """The last stage's next result, for every other stage. Its exception is a ConnectionError if that is gone."""
        raise AssertionError("the last stage knows its results")

    def all_gather(self, value: bytes) -> list[bytes]:
        """Every stage's `value`, in their order. Not while steps run."""
        return [value]

    def all_reduce_min(self, value: int) -> int:
        """The smallest of every stage's `value`. Not while steps run."""
        return min(map(int, self.all_gather(str(value).encode())))

    def close(self) -> None:
        """Leave the group."""


class LinkedPipelineGroup(PipelineGroup):
    def __init__(self, rank: int, ranks: Sequence[int], links: dict[int, StageLink]) -> None:
        """`ranks`: of all stages, in order. `links`: to each of the others."""
        self.stage, self.size = ranks.index(rank), len(ranks)
        self._links = links
        self._next = links[ranks[self.stage + 1]] if not self.is_last else None
        self._before = links[ranks[self.stage - 1]] if not self.is_first else None
        self._last = links.get(ranks[-1])

    def send(self, x: Tensor) -> None:
        assert self._next is not None, "there is no next stage"
        self._next.send(x.contiguous().view(-1).view(torch.uint8).numpy().data)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self._before is not None, "there is no stage before this one"
        return torch.frombuffer(self._before.receive().result(), dtype=dtype).view(*shape)

    def publish(self, result: Buffer) -> None:
        assert self.is_last
        for link in self._links.values():
            link.send(result)

    def next_result(self) -> Future[bytearray]:
        assert self._last is not None, "the last stage knows its results"
        return self._last.receive()

    def all_gather(self, value: bytes) -> list[bytes]:
        values = [value]
        if self._before is not None:
            values = [*_decode(self._before.receive().result()), value]
        if self._next is not None:
            self._next.send(msgspec.msgpack.encode(values))
            return _decode(self.next_result().result())
        self.publish(msgspec.msgpack.encode(values))
        return values

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class NcclPipelineGroup(LinkedPipelineGroup):
    """Over torch.distributed's default group, on the current stream."""

    def __init__(self, rank: int, ranks: Sequence[int], links: dict[int, StageLink]) -> None:
        super().__init__(rank, ranks, links)
        self._ranks = ranks

    def send(self, x: Tensor) -> None:
        dist.send(x.contiguous(), self._ranks[self.stage + 1])

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        dist.recv(x, self._ranks[self.stage - 1])
        return x


def _decode(message: bytearray) -> list[bytes]:
    return msgspec.msgpack.decode(message, type=list[bytes])
