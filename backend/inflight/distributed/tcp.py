"""A RankGroup over TCP, without MPI: the leader has a connection to every other rank, and sends to one after the other.

The ranks find each other through a store of torch, at an address that all know (`outer_job.Rendezvous`). Those of
one machine connect over loopback, others at the address of the leader's machine. Who connects must send a secret from
the store. A waiting rank sleeps in the kernel. Only raw bytes travel. A rank that ends closes its connections: then the
calls of all others end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from inflight.distributed.host_address import host_address
from inflight.distributed.outer_job import Rendezvous
from inflight.errors import ConfigurationError

JOIN_SECONDS = 600.0
"""Long, because ranks of other machines may start late."""
LOOPBACK = "127.0.0.1"
SECRET_BYTES = 32
LENGTH = struct.Struct("!Q")
NUMBER = struct.Struct("!I")
HERE = b"\1"


class TcpRankGroup:
    """Implements rank_group.RankGroup. To be used from one thread only."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Collective. Raises ConfigurationError if the ranks do not find each other."""
        self.rank, self.size = rendezvous.rank, rendezvous.size
        try:
            store = PrefixStore(rendezvous.prefix, _open_store(rendezvous))
            self.several_hosts = len(_networks(store, self.rank, self.size)) > 1
            self._peers = _accept(store, self) if self.rank == 0 else [_connect(store, self.rank)]
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(
                f"the {self.size} ranks did not find each other at {rendezvous.host}:{rendezvous.port}: {reason}"
            ) from None
        self._store = store  # on the leader it serves, also for the ranks that still close their connections

    def broadcast(self, payload: bytes | None) -> bytes:
        """See RankGroup. The bytes follow their length. Raises ConnectionError if another rank has ended."""
        if payload is not None:
            frame = LENGTH.pack(len(payload)) + payload
            for peer in self._peers:
                peer.sendall(frame)
            return payload
        return _receive(self._peers[0], LENGTH.unpack(_receive(self._peers[0], LENGTH.size))[0])

    def barrier(self) -> None:
        """See RankGroup. Every rank reports to the leader, which then answers all."""
        for act in (_receive_sign, _send_sign) if self.rank == 0 else (_send_sign, _receive_sign):
            for peer in self._peers:
                act(peer)

    def close(self) -> None:
        self.barrier()  # nobody is in a call any more, nor uses the store
        self.abort()

    def abort(self) -> None:
        """Close the connections, which ends the calls of all other ranks."""
        for peer in self._peers:
            peer.close()


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


def _networks(store: Store, rank: int, size: int) -> set[bytes]:
    """The machines, or rather network namespaces, in which the ranks are: loopback reaches no further."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    store.set(f"network/{rank}", f"{boot} {os.readlink('/proc/self/ns/net')}")
    return {store.get(f"network/{other}") for other in range(size)}


def _accept(store: Store, group: TcpRankGroup) -> list[socket.socket]:
    """As the leader, a connection to each other rank, in their order."""
    host = host_address() if group.several_hosts else LOOPBACK
    secret = secrets.token_bytes(SECRET_BYTES)
    peers: dict[int, socket.socket] = {}
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(JOIN_SECONDS)
        address, port = listener.getsockname()[:2]
        store.set("leader", f"{address} {port} {secret.hex()}")
        while len(peers) < group.size - 1:
            peer, _ = listener.accept()
            peer.settimeout(JOIN_SECONDS)
            told = _receive(peer, SECRET_BYTES + NUMBER.size)
            if not secrets.compare_digest(told[:SECRET_BYTES], secret):
                peer.close()
                continue
            peers[NUMBER.unpack(told[SECRET_BYTES:])[0]] = _ready(peer)
    return [peers[rank] for rank in sorted(peers)]


def _connect(store: Store, rank: int) -> socket.socket:
    address, port, secret = store.get("leader").decode().split()
    peer = socket.create_connection((address, int(port)), timeout=JOIN_SECONDS)
    peer.sendall(bytes.fromhex(secret) + NUMBER.pack(rank))
    return _ready(peer)


def _ready(peer: socket.socket) -> socket.socket:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(None)  # an idle engine's next broadcast may take as long as it likes
    return peer


def _send_sign(peer: socket.socket) -> None:
    peer.sendall(HERE)


def _receive_sign(peer: socket.socket) -> None:
    _receive(peer, len(HERE))


def _receive(peer: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        received = peer.recv_into(view)
        if not received:
            raise ConnectionError("another rank has ended")
        view = view[received:]
    return bytes(buffer)
