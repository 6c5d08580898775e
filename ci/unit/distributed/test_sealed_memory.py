"""Memory that one process fills and others map: nobody writes to it once it is whole, and half of it is never used.

Run: pytest ci/unit/distributed/test_sealed_memory.py
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from inflight.distributed import sealed_memory
from inflight.distributed.sealed_memory import HUGE_PAGE_BYTES, SealedMemory, create_sealable_memory
from inflight.distributed.shared_memory import open_place, place_of

OTHER = """
import os, signal, sys
from inflight.distributed.sealed_memory import SealedMemory
from inflight.distributed.shared_memory import open_place

memory = SealedMemory(open_place(sys.argv[1]), 60.0)
region = memory.map(5_000_000)
region.memory[:6] = b"filled"
print("has begun", flush=True)
sys.stdin.readline()
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
memory.seal(b"header")
memory.close()
"""


@pytest.fixture
def holder() -> Iterator[int]:
    descriptor = create_sealable_memory()
    yield descriptor
    os.close(descriptor)


def start_other(holder: int, what: str) -> subprocess.Popen[str]:
    """A process that fills the memory, and has begun to."""
    arguments = [sys.executable, "-c", OTHER, place_of(holder), what]
    other = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "has begun\n"
    return other


def test_what_another_process_has_filled_is_mapped_and_cannot_be_written(holder: int) -> None:
    with start_other(holder, "seals") as other:
        other.communicate("\n")
    memory = SealedMemory(open_place(place_of(holder)))
    assert memory.is_sealed and memory.header() == b"header"
    region = memory.map(5_000_000)
    assert region.address % HUGE_PAGE_BYTES == 0 and region.num_bytes == 6 * 2**20
    assert bytes(region.memory[:8]) == b"filled\0\0"
    with pytest.raises(ValueError, match="ends before"):
        memory.map(1)
    memory.close()
    with pytest.raises(PermissionError):
        os.pwrite(holder, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(holder, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(holder, HUGE_PAGE_BYTES)


def test_the_process_that_seals_it_keeps_its_own_mapping_where_it_is(holder: int) -> None:
    memory = SealedMemory(os.dup(holder))
    region = memory.map(HUGE_PAGE_BYTES)
    region.memory[:3] = b"own"
    memory.remove(region.address, 100)  # less than a page: nothing
    memory.seal(b"")
    memory.close()
    assert bytes(region.memory[:3]) == b"own"


def test_what_is_given_back_reads_as_zeros(holder: int) -> None:
    memory = SealedMemory(os.dup(holder))
    region = memory.map(HUGE_PAGE_BYTES)
    region.memory[:] = b"\1" * HUGE_PAGE_BYTES
    before = os.fstat(holder).st_blocks
    memory.remove(region.address + 5, 3 * mmap.PAGESIZE)
    assert before - os.fstat(holder).st_blocks == 2 * mmap.PAGESIZE // 512
    assert region.memory[mmap.PAGESIZE - 1] == 1 and not any(region.memory[mmap.PAGESIZE : 3 * mmap.PAGESIZE])


def test_what_a_killed_process_has_filled_is_dropped(holder: int) -> None:
    with start_other(holder, "dies") as other:
        other.communicate("\n")
    assert other.returncode == -signal.SIGKILL
    memory = SealedMemory(open_place(place_of(holder)))
    assert not memory.is_sealed and bytes(memory.map(5_000_000).memory[:6]) == bytes(6)


def test_nobody_else_opens_it_while_it_is_filled(holder: int) -> None:
    with start_other(holder, "seals") as other:
        with pytest.raises(TimeoutError):
            SealedMemory(open_place(place_of(holder)))
        other.communicate("\n")
    assert SealedMemory(open_place(place_of(holder))).is_sealed


def test_it_is_waited_for_as_long_as_it_grows(holder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    filler = SealedMemory(open_place(place_of(holder)))
    region = filler.map(2 * HUGE_PAGE_BYTES)

    def seal() -> None:
        filler.seal(b"")
        filler.close()

    happens = iter([lambda: filler.allocate(region, 0, 1), lambda: filler.allocate(region, HUGE_PAGE_BYTES, 1), seal])
    monkeypatch.setattr(sealed_memory.time, "sleep", lambda seconds: next(happens)())
    assert SealedMemory(open_place(place_of(holder)), 0.0).is_sealed


def test_memory_that_its_holder_has_given_back_is_not_opened(holder: int) -> None:
    descriptor = create_sealable_memory()
    place = place_of(descriptor)
    os.dup2(holder, descriptor)  # the number stands for something else
    assert open_place(place) == -1
    os.close(descriptor)
    assert open_place(place) == -1
