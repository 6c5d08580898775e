"""A RankGroup without MPI, over gloo: ranks find each other through a store at an address that all of them know.

Ranks of one machine communicate over loopback, others over the interface that GLOO_SOCKET_IFNAME names, or that of the
machine's name. gloo's waits sleep in the kernel, so idle ranks cost nothing. Only raw bytes are exchanged. A rank that
dies closes its connections, which fails the calls of all others.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from inflight.distributed.outer_job import Rendezvous
from inflight.errors import ConfigurationError

JOIN_TIMEOUT = timedelta(minutes=10)
"""Long, because ranks of other machines may start late."""
FOREVER = timedelta(days=10_000)
"""Of a broadcast: an idle engine's next one may take as long as it likes."""


class GlooRankGroup:
    """Implements rank_group.RankGroup. To be used from one thread only."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Collective. Raises ConfigurationError if the ranks do not find each other."""
        self.rank, self.size = rendezvous.rank, rendezvous.size
        try:
            store = PrefixStore(rendezvous.prefix, _open_store(rendezvous))
            self.several_hosts = len(_networks(store, self.rank, self.size)) > 1
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = FOREVER
            options._devices = [_device(several_hosts=self.several_hosts)]
            self._group = ProcessGroupGloo(store, self.rank, self.size, options)
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(
                f"the {self.size} ranks did not find each other at {rendezvous.host}:{rendezvous.port}: {reason}"
            ) from None

    def broadcast(self, payload: bytes | None) -> bytes:
        """See RankGroup. Sends the length first, then the bytes unless the payload is empty."""
        length = torch.tensor([len(payload) if payload is not None else 0])
        self._broadcast(length)
        if not length.item():
            return b""
        buffer = np.empty(int(length.item()), dtype=np.uint8)
        if payload is not None:
            buffer[:] = np.frombuffer(payload, dtype=np.uint8)
        self._broadcast(torch.from_numpy(buffer))
        return payload if payload is not None else buffer.tobytes()

    def barrier(self) -> None:
        self._group.barrier().wait()

    def close(self) -> None:
        """Connections close with the process: a rank that left earlier would fail those that are still in a call."""

    def abort(self) -> None:
        """Nothing to do: the connections of a process that ends fail the other ranks' calls."""

    def _broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


def _open_store(rendezvous: Rendezvous) -> Store:
    if rendezvous.is_served or rendezvous.rank > 0:
        return TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=JOIN_TIMEOUT)
    # At this address only: by itself the store would listen on every interface.
    listener = socket.create_server((rendezvous.host, rendezvous.port))
    return TCPStore(
        rendezvous.host,
        rendezvous.port,
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _networks(store: Store, rank: int, size: int) -> set[bytes]:
    """The machines, or rather network namespaces, in which the ranks are: loopback reaches no further."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    store.set(f"network/{rank}", f"{boot} {os.readlink('/proc/self/ns/net')}")
    return {store.get(f"network/{other}") for other in range(size)}


def _device(*, several_hosts: bool) -> object:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "") if several_hosts else "lo"
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname=socket.gethostname())
