"""A front that kills one of its ranks once it has delivered so many responses, and looks at what becomes of results.

A rank has its number among those of all replicas.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from real_engine import rank_pids

from inflight.config import EngineConfig
from inflight.executor.executor import make_launchers
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.front.remote import RemoteFront
from inflight.executor.wire.launcher import Launcher, RunningLaunch
from inflight.result import Response


class MortalLauncher:
    """Implements Launcher over another one."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.owns_ranks = launcher.owns_ranks
        self.starts_processes = launcher.starts_processes
        self.absent = launcher.absent
        self.num_deaths = 0
        """Launches to come that are killed while they load."""

    @property
    def num_spares(self) -> int:
        return self._launcher.num_spares

    def end_spares(self) -> None:
        self._launcher.end_spares()

    def close(self) -> None:
        self._launcher.close()

    def open(self) -> RunningLaunch | None:
        launch = self._launcher.open()
        if self.num_deaths > 0:
            self.num_deaths -= 1
            os.kill(self.pids()[0], signal.SIGKILL)
        return launch

    def pids(self) -> list[int]:
        return self._launcher.pids()


class MortalFront(RemoteFront):
    def __init__(self, config: EngineConfig) -> None:
        self.launchers = [MortalLauncher(launcher) for launcher in make_launchers(config)]
        super().__init__(config, *self.launchers)
        self.num_delivered = 0
        self.deaths: list[tuple[int, int]] = []
        """(responses that are delivered before, rank) of each kill to come."""
        self.num_killed = 0
        self._num_noticed = 0
        """Losses of ranks that the last kill brings the front to."""

    def rank_pid(self, rank: int) -> int:
        replica, rank = divmod(rank, self._config.num_replica_ranks)
        pids = self._connections[replica].pids()
        if self._config.num_replica_ranks > 1:
            return rank_pids(pids)[rank]
        (pid,) = (pid for pid in pids if b"inflight.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return pid

    def _deliver(self, responses: Iterable[Response]) -> None:
        responses = list(responses)
        super()._deliver(responses)
        self.num_delivered += len(responses)
        # What ranks said before they were killed may come after it, and must not kill the same ones again.
        is_due = self.deaths and self.num_delivered >= self.deaths[0][0]
        if is_due and self.num_losses() >= self._num_noticed:
            _, rank = self.deaths.pop(0)
            self._num_noticed = self.num_losses() + 1
            os.kill(self.rank_pid(rank), signal.SIGKILL)
            self.num_killed += 1


def assert_same(result: GenerationResult, wanted: GenerationResult, feature: str, *, exact: bool = False) -> None:
    """The same tokens and ends. Numbers beside them may differ in their last digits, unless `exact`: a chunk of tokens
    sums up in another order than one token."""
    close, sums = ({"rtol": 0, "atol": 0},) * 2 if exact else ({"rtol": 0, "atol": 2e-4}, {"atol": 2e-3})
    for found, expected in zip(result.result().outputs, wanted.result().outputs, strict=True):
        assert found.token_ids == expected.token_ids, feature
        assert found.text == expected.text, feature
        assert found.finish_reason is expected.finish_reason, feature
        assert len(found.log_probs) == len(expected.log_probs), feature
        np.testing.assert_allclose(found.log_probs, expected.log_probs, **close, err_msg=feature)
        np.testing.assert_allclose(found.cumulative_logprob, expected.cumulative_logprob, **sums, err_msg=feature)
    for index in range(len(wanted.result().outputs)):
        tensors, numbers = result.tensors(index), wanted.tensors(index)
        assert set(tensors) == set(numbers), feature
        for name, array in numbers.items():
            np.testing.assert_allclose(tensors[name], array, **close, err_msg=f"{feature}: {name}")
