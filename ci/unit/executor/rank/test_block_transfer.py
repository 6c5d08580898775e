"""Blocks of prompts between two ranks that are threads of this process: by shared memory and over the network."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import zmq
from calls import until

from inflight.distributed.sockets import CurveKeys
from inflight.executor.rank.block_transfer import receiver as receiver_module
from inflight.executor.rank.block_transfer.receiver import BlockReceiver
from inflight.executor.rank.block_transfer.sender import BlockSender
from inflight.executor.wire.block_messages import BlockFetch, Endpoint, Fetched, report
from inflight.layers.attention import KeyValueSpec
from inflight.layers.state import StateSpec, TensorSpec, Unit
from inflight.runtime import prompt_blocks
from inflight.runtime.prompt_blocks import PromptBlocks
from inflight.runtime.state_store import StateShape, StateStore
from inflight.scheduler_output import Arrival, Export

SHAPE = StateShape(
    specs=(
        KeyValueSpec(num_kv_heads=2, head_dim=8, dtype=torch.float32).state_spec,
        KeyValueSpec(num_kv_heads=1, head_dim=4, dtype=torch.bfloat16).state_spec,
    ),
    block_size=4,
)
STATE = StateSpec(unit=Unit.SEQUENCE, tensors=(TensorSpec("recurrent", (2, 8), torch.float32),))
NUM_BLOCKS, NUM_SLOTS = 12, 6
SECRET = "s" * 64


@dataclass
class Rank:
    """Its cache, and what it has for others or from them."""

    shape: StateShape = SHAPE
    cache: StateStore = field(init=False)
    blocks: PromptBlocks = field(init=False)

    def __post_init__(self) -> None:
        self.cache = StateStore(self.shape, NUM_BLOCKS, torch.device("cpu"), NUM_SLOTS)
        self.blocks = PromptBlocks(self.cache, self.shape, max_tokens=8 * SHAPE.block_size)

    def content(self, block_ids: list[int]) -> list[torch.Tensor]:
        return [cache[block_ids] for layer in self.cache.states for cache in (layer["keys"], layer["values"])]


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    both = Rank(), Rank()
    for cache in (cache for layer in both[0].cache.states for cache in (layer["keys"], layer["values"])):
        cache.copy_(torch.randn(cache.shape).to(cache.dtype))
    yield both
    for rank in both:
        rank.blocks.close()


class Link:
    """A sender over the one rank's blocks, a receiver over the other's, and what the receiver reports."""

    def __init__(
        self,
        folder: Path,
        ranks: tuple[Rank, Rank],
        *,
        secret: str = SECRET,
        timeout_ms: int = 60_000,
        listens: bool = True,
    ) -> None:
        """`listens`: whether the leader does, from the start."""
        self.sender = BlockSender(
            ranks[0].blocks,
            folder / "kv.0",
            address="127.0.0.1",
            keys=CurveKeys(SECRET),
            timeout_ms=60_000,
            is_alone=True,
        )
        self._endpoint = f"ipc://{folder / 'reports'}"
        self._context = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        if listens:
            self.listen()
        self.receiver = BlockReceiver(
            ranks[1].blocks, rank=0, reports=self._endpoint, keys=CurveKeys(secret), timeout_ms=timeout_ms
        )
        self._numbers = iter(range(1, 100))

    def listen(self) -> None:
        """The leader begins to."""
        self._reports.bind(self._endpoint)

    def fetch(self, key: bytes, num_blocks: int, *, is_local: bool, endpoint: Endpoint | None = None) -> bool:
        """Whether the blocks have arrived, for request 7."""
        self.begin(key, num_blocks, is_local=is_local, endpoint=endpoint)
        return self.told()

    def begin(self, key: bytes, num_blocks: int, *, is_local: bool, endpoint: Endpoint | None = None) -> None:
        self.receiver.begin(
            BlockFetch(
                request_id=7,
                number=next(self._numbers),
                key=key,
                endpoints=[endpoint or self.sender.endpoint],
                is_local=is_local,
                num_blocks=num_blocks,
            )
        )

    def told(self) -> bool:
        """Whether the leader is told that they have arrived."""
        assert self._reports.poll(60_000), "the receiver said nothing"
        message = report.decode(self._reports.recv())
        assert isinstance(message, Fetched)
        return message.has_arrived

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        self._context.destroy(linger=0)


@pytest.fixture
def link(tmp_path: Path, ranks: tuple[Rank, Rank]) -> Iterator[Link]:
    link = Link(tmp_path, ranks)
    yield link
    link.close()
    assert not (tmp_path / "kv.0").exists()


def num_files() -> int:
    """Memory of prompts that this process holds open or has mapped, and that something still refers to."""
    gc.collect()  # what earlier tests have left in cycles
    held = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("inflight-prompt" in path for path in held) + Path("/proc/self/maps").read_text().count(
        "inflight-prompt"
    )


@pytest.mark.parametrize("is_local", [True, False], ids=["shared memory", "network"])
def test_blocks_arrive_as_they_were(link: Link, ranks: tuple[Rank, Rank], is_local: bool) -> None:
    first, second = ranks
    first.blocks.export([Export(key=b"key", blocks=[3, 1, 8])])
    wanted = [content.clone() for content in first.content([1, 8])]
    for layer in first.cache.states:
        layer["keys"].zero_()
    assert link.fetch(b"key", 3, is_local=is_local)
    until(lambda: first.blocks.num_exported == 0, "who has sent it forgets it")
    second.blocks.place([Arrival(request_id=7, blocks=[(1, 5), (2, 0)])])
    for found, expected in zip(second.content([5, 0]), wanted, strict=True):
        assert torch.equal(found, expected)
    assert second.blocks.num_arrived == 0
    until(lambda: num_files() == 0, "the memory is gone")


@pytest.mark.parametrize("is_local", [True, False], ids=["shared memory", "network"])
@pytest.mark.parametrize("specs", [SHAPE.specs[1:], (*SHAPE.specs, STATE), (STATE,), ()])
def test_a_stage_with_other_layers_than_the_leaders_gets_its_part(
    tmp_path: Path, is_local: bool, specs: tuple[StateSpec, ...]
) -> None:
    """Blocks, states of sequences, or nothing."""
    shape = StateShape(specs=specs, block_size=SHAPE.block_size)
    first, second = Rank(shape), Rank(shape)
    for tensor in [*first.cache.block_tensors, *first.cache.slot_tensors]:
        tensor.copy_(torch.randn(tensor.shape))
    link = Link(tmp_path, (first, second))
    first.blocks.export([Export(key=b"key", blocks=[3, 1, 8], slot=4)])
    assert link.fetch(b"key", 3, is_local=is_local)
    second.blocks.place([Arrival(request_id=7, blocks=[(0, 5)], slots=[1, 2])])
    link.close()
    for found, wanted in zip(second.cache.block_tensors, first.cache.block_tensors, strict=True):
        assert torch.equal(found[5], wanted[3])
    for found, wanted in zip(second.cache.slot_tensors, first.cache.slot_tensors, strict=True):
        assert torch.equal(found[1], wanted[4]) and torch.equal(found[2], wanted[4])


@pytest.mark.parametrize("is_local", [True, False], ids=["shared memory", "network"])
def test_what_is_not_there_is_told_at_once(link: Link, ranks: tuple[Rank, Rank], is_local: bool) -> None:
    assert not link.fetch(b"another key", 3, is_local=is_local)
    ranks[0].blocks.export([Export(key=b"key", blocks=[3])])
    assert not link.fetch(b"key", 2, is_local=is_local), "another number of bytes"
    assert ranks[1].blocks.num_arrived == 0


def test_memory_that_the_system_would_kill_for_is_not_taken(
    link: Link, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks[0].blocks.export([Export(key=b"early", blocks=[3])])
    monkeypatch.setattr(prompt_blocks, "available_memory", lambda: 0)
    ranks[0].blocks.export([Export(key=b"late", blocks=[3])])
    assert ranks[0].blocks.num_exported == 1
    assert not link.fetch(b"late", 1, is_local=True) and not link.fetch(b"early", 1, is_local=False)
    assert link.fetch(b"early", 1, is_local=True), "it takes none"


def test_a_rank_that_is_gone_is_not_waited_for(link: Link, tmp_path: Path) -> None:
    gone = Endpoint(f"ipc://{tmp_path / 'nobody'}", "tcp://127.0.0.1:1")
    for is_local in (True, False):
        assert not link.fetch(b"key", 1, is_local=is_local, endpoint=gone)
    assert not link.fetch(b"key", 1, is_local=False, endpoint=Endpoint(gone.local)), "it cannot be reached from afar"


def test_who_does_not_know_the_secret_gets_nothing(tmp_path: Path, ranks: tuple[Rank, Rank]) -> None:
    link = Link(tmp_path, ranks, secret="t" * 64, timeout_ms=500)
    ranks[0].blocks.export([Export(key=b"key", blocks=[3])])
    assert not link.fetch(b"key", 1, is_local=False)
    assert ranks[0].blocks.num_exported == 1
    link.close()


def test_garbage_harms_nobody(link: Link, ranks: tuple[Rank, Rank]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(link.sender.endpoint.local)
        for garbage in (b"", b"\xc1", bytes(500)):
            stranger.send(garbage)
        ranks[0].blocks.export([Export(key=b"key", blocks=[3])])
        assert link.fetch(b"key", 1, is_local=True)


def test_the_oldest_are_dropped_for_newer_ones_and_all_after_a_time(ranks: tuple[Rank, Rank]) -> None:
    blocks = ranks[0].blocks
    for number in range(4):
        blocks.export([Export(key=bytes([number]), blocks=[0, 1, 2])])
    assert [blocks.exported(bytes([number])) is not None for number in range(4)] == [False, False, True, True]
    newest = blocks.exported(b"\3")
    assert newest is not None and blocks.expire(newest.since - 1e-9) == newest.since
    assert blocks.num_exported == 1 and blocks.expire(newest.since) is None and blocks.num_exported == 0
    del newest
    assert num_files() == 0


def test_what_comes_for_a_request_that_is_over_is_dropped(link: Link, ranks: tuple[Rank, Rank]) -> None:
    ranks[0].blocks.export([Export(key=b"key", blocks=[3])])
    assert link.fetch(b"key", 1, is_local=True)
    link.receiver.drop(7)
    assert ranks[1].blocks.num_arrived == 0


def test_the_leader_is_told_once_it_listens(
    tmp_path: Path, ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "LINGER_MS", 0)  # nothing waits because its socket is being closed
    with closing(Link(tmp_path, ranks, listens=False)) as link:
        ranks[0].blocks.export([Export(key=b"key", blocks=[3])])
        link.begin(b"key", 1, is_local=True)
        until(lambda: ranks[1].blocks.num_arrived, "it has arrived")
        link.listen()
        assert link.told()
