"""Holds the memory of the ranks' weights, so that it outlives the ranks, and tells each launch where it is.

There is one for each rank of a replica, which equal ranks of all replicas and of spares map. The front neither fills
nor maps it. It ends with the front, however that ends.
"""

from __future__ import annotations

import os
import threading

from inflight.config import EngineConfig
from inflight.distributed.sealed_memory import create_sealable_memory
from inflight.distributed.shared_memory import place_of
from inflight.weight_identity import weight_identity


class WeightHolder:
    """Used by the launchers of all replicas, each from a thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._identity = ""

    def places(self) -> list[str]:
        """Where each rank of a replica finds its weights, or is to leave them; empty if `share_weights` is false. New
        memory if the checkpoint has changed: what of it the ranks of earlier launches still map stays theirs."""
        if not self._config.share_weights:
            return []
        identity = weight_identity(self._config)
        with self._lock:
            if identity != self._identity:
                self._close()
                self._identity = identity
            if not self._descriptors:
                self._descriptors = [create_sealable_memory() for _ in range(self._config.num_replica_ranks)]
            return [place_of(descriptor) for descriptor in self._descriptors]

    def close(self) -> None:
        """Give the memory back, once no rank maps it. The next launch gets new memory."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
