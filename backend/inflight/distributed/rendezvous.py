"""Stores of torch.distributed in which ranks find each other. The leader makes them; the calls are collective."""

from __future__ import annotations

import os
import socket
import tempfile
from datetime import timedelta

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from inflight.distributed.host_address import host_address
from inflight.distributed.rank_group import RankGroup

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Long, because ranks load their libraries at different speeds. The executor notices a rank that died, not this."""


def file_store(rank_group: RankGroup) -> tuple[str, Store]:
    """A store in a folder that only this user can enter (mkdtemp makes it 0700), and that folder, to be removed."""
    folder = tempfile.mkdtemp(prefix="inflight-ranks-") if rank_group.rank == 0 else ""
    folder = rank_group.broadcast(folder.encode() if rank_group.rank == 0 else None).decode()
    return folder, FileStore(os.path.join(folder, "store"), rank_group.size)


def tcp_store(rank_group: RankGroup) -> Store:
    """A store that the leader serves at a free port of its machine's address only."""
    if rank_group.rank == 0:
        host = host_address()
        listener = socket.create_server((host, 0))
        port = int(listener.getsockname()[1])
        rank_group.broadcast(f"{host}:{port}".encode())
        return TCPStore(
            host,
            port,
            rank_group.size,
            is_master=True,
            wait_for_workers=False,
            timeout=RENDEZVOUS_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
    host, _, port_text = rank_group.broadcast(None).decode().rpartition(":")
    return TCPStore(host, int(port_text), rank_group.size, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
