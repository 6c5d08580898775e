"""Runs a function in rank processes with a RankGroup over pipes, and returns each rank's result to the test.

Ranks are forked from a server that has imported what their functions' modules import, torch and transformers above all,
and has done nothing with it: each of them would import that for seconds. They are not forked from the tests' process:
torch's threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import Any

import pytest

TIMEOUT_S = 240


class PipeGroup:
    """RankGroup over pipes between the leader and each other rank."""

    several_hosts = False

    def __init__(self, rank: int, size: int, pipes: list[Connection]) -> None:
        """`pipes`: the leader's to all others in order of their ranks; another rank's only one, to the leader."""
        self.rank = rank
        self.size = size
        self._pipes = pipes

    def broadcast(self, payload: bytes | None) -> bytes:
        if self.rank:
            return self._pipes[0].recv_bytes()
        assert payload is not None
        for pipe in self._pipes:
            pipe.send_bytes(payload)
        return payload

    def barrier(self) -> None:
        if self.rank:
            self._pipes[0].send_bytes(b"here")
        else:
            for pipe in self._pipes:
                pipe.recv_bytes()
        self.broadcast(b"all" if self.rank == 0 else None)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()

    def abort(self) -> None:
        self.close()


def run_on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """See run_on_ranks."""
    return run_on_ranks(2, function, *arguments)


def run_on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The answer of each rank of `function(group, *arguments)`; an exception is its traceback, raised."""
    context = _server_of(function.__module__)
    pairs = [context.Pipe() for _ in range(size - 1)]
    ends = [[leaders for leaders, _ in pairs], *([others] for _, others in pairs)]
    answers = [context.Pipe(duplex=False) for _ in ends]
    processes = [
        context.Process(
            target=_main,
            args=(dict(os.environ), rank, size, ends[rank], answers[rank][1], function, arguments),
        )
        for rank in range(size)
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


def _server_of(module: str) -> ForkServerContext:
    """The server that ranks of this process are forked from. It imports what the first function's module does, and
    transformers' classes, which most modules do; ranks of another module import the little that is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module, "tiny_checkpoints"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # it knows of no other path
        ensure_running()
    return context


def _main(
    environment: dict[str, str],
    rank: int,
    size: int,
    pipes: list[Connection],
    answer: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the server has that of its start
    try:
        answer.send((True, function(PipeGroup(rank, size, pipes), *arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
