"""What pipeline stages send each other, on one host and on several, and who may not.

Run: pytest ci/unit/distributed/test_stage_links.py
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import PipeGroup, run_on_ranks

from inflight.distributed.host_address import INTERFACE
from inflight.distributed.mapping import Mapping
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.stage_links import GREETING_BYTES, MAX_STRANGERS, StageLink, connect_stages

pytestmark = pytest.mark.slow

PATIENCE = 120
"""Seconds after which something that should happen counts as never happening."""
CPU = torch.device("cpu")


def named_memory() -> set[str]:
    """Shared memory that this process maps and that has a name, which would stay behind when the process is killed."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}
    return {name for name in names if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}


def own_sockets() -> list[str]:
    """Names of the sockets by which stages of this process can be found."""
    own = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(os.readlink(file))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@inflight-" in line]
    return [words[-1] for words in lines if f"socket:[{words[6]}]" in own]


def exchange(rank_group: PipeGroup, mapping: Mapping, several_hosts: bool) -> dict[str, Any]:
    """Hidden states through all stages, two results back, the smallest value; then the last stage goes."""
    rank_group.several_hosts = several_hosts
    before = named_memory()
    groups = ParallelGroups.create(rank_group, mapping, CPU)
    pipeline, found = groups.pipeline, {}
    x = torch.full((2, 3), float(rank_group.rank), dtype=torch.bfloat16)
    if not pipeline.is_first:
        x = pipeline.receive((2, 3), torch.bfloat16, CPU) + 1
    if not pipeline.is_last:
        pipeline.send(x)
    found["hidden"] = x.float().tolist()
    found["place"] = (groups.tensor.rank, groups.tensor.size, pipeline.stage, pipeline.size)
    found["sum"] = groups.tensor.all_reduce(torch.tensor([float(rank_group.rank)])).tolist()
    found["smallest"] = groups.all_reduce_min(10 - rank_group.rank)
    if pipeline.is_last:
        pipeline.publish(b"first")
        pipeline.publish(bytes(10_000_000))
        rank_group.barrier()
    else:
        found["results"] = [len(pipeline.next_result().result(PATIENCE)) for _ in range(2)]
        late = pipeline.next_result()
        rank_group.barrier()
        last = mapping.pipeline_ranks(rank_group.rank)[-1]
        with pytest.raises(ConnectionError, match=f"the connection to rank {last} has ended"):
            late.result(PATIENCE)
        with pytest.raises(ConnectionError):
            pipeline.next_result().result(PATIENCE)
    found["left behind"] = named_memory() - before
    groups.close()
    return found


def exchange_twice(rank_group: PipeGroup, mapping: Mapping) -> list[dict[str, Any]]:
    """As ranks of one host and of several."""
    return [exchange(rank_group, mapping, several_hosts) for several_hosts in (False, True)]


def test_three_stages_exchange_what_they_compute() -> None:
    for rank, answers in enumerate(run_on_ranks(3, exchange_twice, Mapping(1, 3))):
        for found in answers:
            assert found["place"] == (0, 1, rank, 3)
            assert found["hidden"] == [[float(rank)] * 3] * 2
            assert found["smallest"] == 8
            assert found.get("results", [5, 10_000_000]) == [5, 10_000_000]
            assert not found["left behind"]


def test_two_stages_of_two_ranks_have_groups_of_their_own() -> None:
    for answers in zip(*run_on_ranks(4, exchange_twice, Mapping(2, 2)), strict=True):
        check_places(answers)


def check_places(answers: Sequence[dict[str, Any]]) -> None:
    assert [found["place"] for found in answers] == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert [found["sum"] for found in answers] == [[1.0], [1.0], [5.0], [5.0]]
    assert [found["hidden"][0][0] for found in answers] == [0.0, 1.0, 1.0, 2.0]
    assert {found["smallest"] for found in answers} == {7}


class ThreadGroup:
    """RankGroup of threads. Before the first barrier ends, `strangers` comes."""

    size = 2
    several_hosts = False

    def __init__(self, rank: int, told: queue.Queue[bytes], barrier: threading.Barrier) -> None:
        self.rank, self._told, self._barrier = rank, told, barrier

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is not None:
            self._told.put(payload)
            return payload
        return self._told.get(timeout=PATIENCE)

    def barrier(self) -> None:
        self._barrier.wait(PATIENCE)

    def close(self) -> None:
        return None

    def abort(self) -> None:
        return None


def linked(barrier: threading.Barrier, *, several_hosts: bool = False) -> dict[int, StageLink]:
    """Both ends of the link between two stages that are threads, by the other stage."""
    told: queue.Queue[bytes] = queue.Queue()
    links: dict[int, StageLink] = {}

    def join(rank: int) -> None:
        group = ThreadGroup(rank, told, barrier)
        group.several_hosts = several_hosts
        links.update(connect_stages(group, (0, 1)))

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return links


def test_machines_are_linked_by_the_interface_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever address the machine's name has."""
    monkeypatch.setenv(INTERFACE, "lo")
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.1")
    links = linked(threading.Barrier(2), several_hosts=True)
    assert {link._socket.getsockname()[0] for link in links.values()} == {"127.0.0.1"}
    for link in links.values():
        link.close()


def test_a_stranger_is_not_taken_for_a_stage() -> None:
    """Every user of the machine may connect, and see the names, but the secret is not among them. Nor does anybody wait
    for those that say nothing, or not all."""
    strangers: list[socket.socket] = []

    def come() -> None:
        if strangers:
            return
        for name in own_sockets():
            for greeting in (b"", bytes(40), name.encode()[-42:] + bytes(8)):
                strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                strangers[-1].connect(b"\0" + name[1:].encode())
                strangers[-1].sendall(greeting)
                strangers[-1].shutdown(socket.SHUT_WR)
            for number in range(MAX_STRANGERS):
                strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                strangers[-1].connect(b"\0" + name[1:].encode())
                strangers[-1].sendall(bytes(number % GREETING_BYTES))

    links = linked(threading.Barrier(2, action=come))
    assert sorted(links) == [0, 1] and len(strangers) >= 6
    links[1].send(b"hidden states")
    assert links[0].receive().result(PATIENCE) == b"hidden states"
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    for link in links.values():
        link.close()
