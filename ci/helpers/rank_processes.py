"""Runs a function in two rank processes with a RankGroup over pipes, and returns each rank's result to the test.

Spawned, not forked: torch and its threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 240


class PipeGroup:
    """RankGroup of two over one pipe."""

    size = 2
    several_hosts = False

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank = rank
        self._pipe = pipe

    def broadcast(self, payload: bytes | None) -> bytes:
        if self.rank == 0:
            assert payload is not None
            self._pipe.send_bytes(payload)
            return payload
        return self._pipe.recv_bytes()

    def barrier(self) -> None:
        self._pipe.send_bytes(b"here")
        self._pipe.recv_bytes()

    def close(self) -> None:
        self._pipe.close()


def run_on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """[answer of rank 0, answer of rank 1] of `function(group, *arguments)`; an exception is its traceback, raised."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    answers = [context.Pipe(duplex=False) for _ in ends]
    processes = [
        context.Process(target=_main, args=(rank, ends[rank], answers[rank][1], function, arguments)) for rank in (0, 1)
    ]
    try:
        for process in processes:
            process.start()
        results = []
        for reader, _ in answers:
            if not reader.poll(TIMEOUT_S):
                raise TimeoutError("a rank did not answer")
            ok, value = reader.recv()
            if not ok:
                raise AssertionError(value)
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _main(
    rank: int, pipe: Connection, answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        answer.send((True, function(PipeGroup(rank, pipe), *arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
