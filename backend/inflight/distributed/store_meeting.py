"""How ranks of a job without MPI meet: rank 0 tells the others in a store of torch where, and a secret.

All ranks know the store's address (`outer_job.Rendezvous`). Ranks of one machine meet on loopback, others at the
address of rank 0's machine. After that the store is not used any more.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from inflight.distributed.host_address import host_address
from inflight.distributed.outer_job import Rendezvous
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.ring_group import RingRankGroup
from inflight.distributed.sockets import JOIN_SECONDS, MIN_SECRET, SocketRankGroup, machine
from inflight.errors import ConfigurationError
from inflight.free_port import free_port

LOOPBACK = "127.0.0.1"


def meet(rendezvous: Rendezvous) -> RankGroup:
    """Join the other ranks. Collective. Raises ConfigurationError if they do not find each other."""
    rank, size = rendezvous.rank, rendezvous.size
    try:
        store = PrefixStore(rendezvous.prefix, _open_store(rendezvous))
        several_machines = len(_machines(store, rank, size)) > 1
        if rank == 0:
            host = host_address() if several_machines else LOOPBACK
            store.set("place", f"tcp://{host}:{free_port(host)} {secrets.token_hex(MIN_SECRET)}")
        endpoint, secret = store.get("place").decode().split()
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"the {size} ranks did not find each other at {rendezvous.host}:{rendezvous.port}: {reason}"
        ) from None
    # Rank 0 keeps the store until all have joined.
    return RingRankGroup(SocketRankGroup(endpoint, rank=rank, size=size, secret=secret))


def _open_store(rendezvous: Rendezvous) -> Store:
    timeout = timedelta(seconds=JOIN_SECONDS)
    if rendezvous.is_served or rendezvous.rank > 0:
        return TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    # At this address only: by itself the store would listen on every interface.
    listener = socket.create_server((rendezvous.host, rendezvous.port))
    return TCPStore(
        rendezvous.host,
        rendezvous.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _machines(store: Store, rank: int, size: int) -> set[bytes]:
    """Those that the ranks are on."""
    store.set(f"machine/{rank}", machine())
    return {store.get(f"machine/{other}") for other in range(size)}
