"""Ranks of one machine add up and gather through shared memory: the same bits on all of them, whatever the timing.

Ranks are threads here, as the calls let other threads run; one test has a process.

Run: pytest ci/unit/kernels/test_collectives.py
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL

import pytest
import torch
from thread_ranks import PATIENCE, ThreadCollectives
from torch import Tensor

from inflight_kernels.cpu import (
    LibraryUnavailable,
    SharedMemoryCollectives,
    library,
    load_collectives,
    segment_bytes,
    variants_here,
)

pytestmark = pytest.mark.slow

CHUNK = 256 * 1024
FLAG = struct.Struct("II56x")
"""A rank's flag in the memory: rounds posted, ranks asleep."""

needs_compiler = pytest.mark.skipif(not library._find_compiler(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def native() -> CDLL:
    return load_collectives()


@pytest.fixture(params=[1, 2, 3, 4])
def ranks(native: CDLL, request: pytest.FixtureRequest) -> Iterator[ThreadCollectives]:
    ranks = ThreadCollectives(request.param)
    yield ranks
    ranks.close()


@pytest.fixture
def two(native: CDLL) -> Iterator[ThreadCollectives]:
    ranks = ThreadCollectives(2)
    yield ranks
    ranks.close()


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Numbers of very different sizes, so that the order in which they are added decides the last digits."""
    generator = torch.Generator().manual_seed(size)
    return [(torch.randn(shape, generator=generator) * 10.0 ** (rank % 3)).to(dtype) for rank in range(size)]


def added_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (513,), (3, 257), (CHUNK // 4 + 3,), (5, CHUNK // 4)], ids=str)
def test_a_sum_is_added_in_rank_order_and_rounded_once(
    ranks: ThreadCollectives, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = parts_of(len(ranks.ranks), shape, dtype)
    assert torch.equal(ranks.all_reduce(parts), added_in_order(parts))


def test_the_order_of_these_sums_can_be_told() -> None:
    parts = parts_of(3, (513,), torch.float32)
    assert not torch.equal(added_in_order(parts), added_in_order(parts[::-1]))


@needs_compiler
def test_signs_and_what_is_no_number_pass(two: ThreadCollectives) -> None:
    special = torch.tensor([-0.0, float("inf"), float("nan"), float("-inf"), 1.0])
    for dtype in (torch.float32, torch.bfloat16):
        total = two.all_reduce([special.to(dtype), torch.tensor([-0.0, 1.0, 1.0, float("inf"), -1.0]).to(dtype)])
        assert str(total.tolist()) == "[-0.0, inf, nan, nan, 0.0]"


@needs_compiler
def test_a_sum_is_written_over_a_tensor_with_gaps_too(two: ThreadCollectives) -> None:
    whole = [torch.ones(4, 6), torch.ones(4, 6)]
    two.run(lambda rank: two.ranks[rank].all_reduce(whole[rank][:, ::2]))
    assert whole[0].tolist() == whole[1].tolist() == [[2.0, 1.0] * 3] * 4


@needs_compiler
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0, 8), (3, CHUNK // 8 + 1), (1, CHUNK)], ids=str)
def test_parts_are_gathered_side_by_side(ranks: ThreadCollectives, shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)
    parts = [numbers + 10**7 * rank for rank in range(len(ranks.ranks))]
    for gathered in ranks.run(lambda rank: ranks.ranks[rank].all_gather(parts[rank])):
        assert torch.equal(gathered, torch.cat(parts, dim=-1))


@needs_compiler
def test_no_round_reads_another_ones_parts(ranks: ThreadCollectives) -> None:
    """Thousands of short rounds, whose threads run as the system likes."""
    lengths = [random.Random(5).choice((1, 3, 40)) for _ in range(3000)]
    size = len(ranks.ranks)

    def add(rank: int) -> bool:
        return all(
            ranks.ranks[rank].all_reduce(torch.full((length,), float(number * size + rank))).tolist()
            == [float(size * size * number + size * (size - 1) // 2)] * length
            for number, length in enumerate(lengths)
        )

    assert all(ranks.run(add))


@needs_compiler
def test_rounds_are_counted_beyond_32_bits(two: ThreadCollectives) -> None:
    for rank in range(2):
        FLAG.pack_into(two.memory, rank * FLAG.size, 2**32 - 3, 0)
    for number in range(8):
        assert two.all_reduce([torch.tensor([float(number)]), torch.tensor([1.0])]).tolist() == [number + 1.0]
    assert FLAG.unpack_from(two.memory)[0] == 5


def wait_for_sleeper(memory: mmap.mmap) -> None:
    """Until a rank sleeps for rank 0."""
    deadline = time.monotonic() + PATIENCE
    while not FLAG.unpack_from(memory)[1]:
        assert time.monotonic() < deadline, "nobody went to sleep"
        time.sleep(0.001)


@needs_compiler
def test_a_rank_that_waits_sleeps_and_is_woken(two: ThreadCollectives) -> None:
    with ThreadPoolExecutor(1) as late:
        waiting = late.submit(two.ranks[1].all_reduce, torch.ones(3))
        wait_for_sleeper(two.memory)
        assert two.ranks[0].all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        assert waiting.result(PATIENCE).tolist() == [2.0] * 3
    assert [FLAG.unpack_from(two.memory, rank * FLAG.size) for rank in range(2)] == [(1, 0)] * 2


OTHER_RANK = """
import mmap, sys, torch
from inflight_kernels.cpu import SharedMemoryCollectives, load_collectives, segment_bytes
native = load_collectives()
memory = mmap.mmap(int(sys.argv[1]), segment_bytes(native, 2))
assert SharedMemoryCollectives(native, memory, 1, 2).all_reduce(torch.ones(3)).tolist() == [3.0] * 3
"""


@pytest.fixture
def sleeping_process(native: CDLL) -> Iterator[tuple[mmap.mmap, subprocess.Popen[bytes]]]:
    """Memory for two ranks, and rank 1, a process, which sleeps because rank 0 has not come."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, segment_bytes(native, 2))
    memory = mmap.mmap(descriptor, 0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", OTHER_RANK, str(descriptor)]
    with subprocess.Popen(command, pass_fds=[descriptor], env=environment) as process:
        os.close(descriptor)
        try:
            wait_for_sleeper(memory)
            yield memory, process
        finally:
            process.kill()


@needs_compiler
def test_a_rank_in_another_process_is_woken(
    native: CDLL, sleeping_process: tuple[mmap.mmap, subprocess.Popen[bytes]]
) -> None:
    memory, process = sleeping_process
    total = SharedMemoryCollectives(native, memory, 0, 2).all_reduce(torch.full((3,), 2.0))
    assert total.tolist() == [3.0] * 3
    assert process.wait(PATIENCE) == 0


@needs_compiler
def test_a_rank_whose_peer_never_comes_can_be_ended(
    sleeping_process: tuple[mmap.mmap, subprocess.Popen[bytes]],
) -> None:
    _, process = sleeping_process
    process.terminate()
    assert process.wait(PATIENCE) == -signal.SIGTERM


@needs_compiler
def test_any_x86_processor_will_do() -> None:
    """And the compiler has nothing to say."""
    for options in ((), *(variant.options for variant in variants_here())):
        assert library.compiled_file("collectives", options).with_suffix(".log").read_text() == ""


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LibraryUnavailable, match="built ahead for this processor, and CXX names no program"):
        load_collectives()
