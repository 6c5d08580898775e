"""A RankGroup over ZeroMQ, for ranks without MPI: of one machine (a socket in a private folder), or of several (TCP).

The leader listens at the one address that it is given, and every other rank connects and says who it is. Once all are
there nobody else can join, and a rank that is lost cannot come back.

    rank r                               leader
       ── Hello(rank, machine, token) ──>      until all have said it
       <── Welcome(several_hosts) ───────
       <── payload ──────────────────────      broadcast
       ── empty ────────────────────────>      barrier: until all have said it,
       <── empty ────────────────────────      then a broadcast

Over TCP all of it is encrypted and authenticated by CURVE. The leader's key is derived from the secret of the launch:
whoever does not know that gets no answer and cannot pass for the leader. The token, derived from it too, proves that a
rank knows it. To be used from one thread only.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from inflight.errors import ConfigurationError

JOIN_SECONDS = 600.0
"""Long, because ranks may start at different times. The launcher notices one that died, not this."""
LINGER_MS = 3000
"""Time that the last messages have to leave."""
RETRY_MS = 20
"""Between two attempts to connect, before the leader listens."""
QUEUED = 16
"""Messages on their way to a rank, above which the leader waits for it."""
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 4}
"""Seconds, and a count. A machine that is silent for 30 s is lost; one whose process dies says so at once."""
MAX_FROM_RANKS = 1024
"""Longest message to the leader, in bytes."""
MIN_SECRET = 32
EVERY_INTERFACE = ("*", "0.0.0.0", "[::]", "")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same for all processes of one kernel, and for no others."""
NAMESPACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/mnt"))
"""Loopback and private folders reach no further."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of every rank but the leader."""

    rank: int
    machine: str
    token: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The leader's answer."""

    several_hosts: bool


class SocketRankGroup:
    """Implements rank_group.RankGroup."""

    def __init__(
        self, endpoint: str, *, rank: int, size: int, secret: str = "", join_seconds: float = JOIN_SECONDS
    ) -> None:
        """Join the other ranks. Collective.

        `endpoint`: ipc://PATH in a folder that only this user can enter, or tcp://ADDRESS:PORT of one interface of the
        leader's machine. `secret`: known to these ranks alone; required for TCP. Raises ConfigurationError if it is not
        such an endpoint, or if not all ranks have joined within `join_seconds`.
        """
        check_endpoint(endpoint, secret)
        self.rank = rank
        self.size = size
        self.several_hosts = False
        self._endpoint = endpoint
        self._keys = CurveKeys(secret)
        self._context = zmq.Context()
        deadline = time.monotonic() + join_seconds
        try:
            if rank == 0:
                self._socket = self._make_socket(zmq.ROUTER)
                self._identities = self._welcome_all(deadline)
            else:
                self._socket = self._make_socket(zmq.DEALER)
                self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                self._say_hello(deadline)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def broadcast(self, payload: bytes | None) -> bytes:
        """See RankGroup. Raises ConnectionError if a rank is lost, as far as this one notices."""
        if self.rank > 0:
            return self.receive()
        assert payload is not None
        self.send(payload, range(1, self.size))
        return payload

    def barrier(self) -> None:
        if self.rank == 0:
            self.await_arrivals(range(1, self.size))
            self.broadcast(b"")
        else:
            self.arrive()
            self.broadcast(None)

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)

    def abort(self) -> None:
        """Nothing to do: the connections end with this process, which the others notice."""

    # -- the halves of the operations ----------------------------------------------------------------------------------

    def send(self, payload: bytes, ranks: Iterable[int]) -> None:
        """On the leader: to these ranks, which call `receive`."""
        for rank in ranks:
            try:
                self._socket.send_multipart([self._identities[rank], payload], copy=False)
            except zmq.ZMQError as error:
                raise ConnectionError(f"rank {rank} is lost ({error})") from None

    def receive(self) -> bytes:
        """On the other ranks: what the leader sends next."""
        with contextlib.suppress(zmq.Again):
            return self._socket.recv(zmq.NOBLOCK)
        if not self._await_message(None):
            raise ConnectionError("the connection to rank 0 has ended")
        return self._socket.recv()

    def arrive(self) -> None:
        """On the other ranks: tell the leader, which calls `await_arrivals`."""
        self._socket.send(b"")

    def await_arrivals(self, ranks: Iterable[int]) -> None:
        """On the leader: until each of these ranks has called `arrive`. Whoever started the ranks notices if one is
        lost meanwhile."""
        missing = {self._identities[rank] for rank in ranks}
        while missing:
            missing.discard(self._socket.recv_multipart()[0])

    # -- joining -------------------------------------------------------------------------------------------------------

    def _make_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set(zmq.SNDHWM, QUEUED)
        socket.set(zmq.RECONNECT_IVL, RETRY_MS)
        if kind == zmq.ROUTER:
            socket.set(zmq.MAXMSGSIZE, MAX_FROM_RANKS)
            socket.set(zmq.ROUTER_MANDATORY, 1)
        if self._endpoint.startswith("tcp://"):
            socket.set(zmq.IPV6, "[" in self._endpoint)
            for option, value in KEEPALIVE.items():
                socket.set(option, value)
            self._keys.protect(socket, is_leader=kind == zmq.ROUTER)
        return socket

    def _welcome_all(self, deadline: float) -> dict[int, bytes]:
        """The leader's half: who of the connected is which rank."""
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"rank 0 cannot listen at {self._endpoint}: {error}") from None
        identities: dict[int, bytes] = {}
        machines = {machine()}
        while missing := sorted(set(range(1, self.size)) - identities.keys()):
            if not self._socket.poll(_milliseconds_to(deadline)):
                raise ConfigurationError(
                    f"ranks {', '.join(map(str, missing))} did not find rank 0 at {self._endpoint} in time: start "
                    "every rank, and let them reach that address"
                )
            identity, *frames = self._socket.recv_multipart()
            try:
                hello = msgspec.msgpack.decode(frames[0], type=Hello)
            except (IndexError, msgspec.DecodeError):
                continue
            if hello.rank in missing and hmac.compare_digest(hello.token, self._keys.token):
                identities[hello.rank] = identity
                machines.add(hello.machine)
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink()
        self.several_hosts = len(machines) > 1
        for identity in identities.values():
            self._socket.send_multipart([identity, msgspec.msgpack.encode(Welcome(self.several_hosts))])
        return identities

    def _say_hello(self, deadline: float) -> None:
        """The other ranks' half."""
        self._socket.connect(self._endpoint)
        self._socket.send(msgspec.msgpack.encode(Hello(self.rank, machine(), self._keys.token)))
        if not self._await_message(deadline):
            raise ConfigurationError(
                f"rank {self.rank} did not find rank 0 at {self._endpoint}, or has another secret: start every rank "
                "of one launch, and let them reach that address"
            )
        self.several_hosts = msgspec.msgpack.decode(self._socket.recv(), type=Welcome).several_hosts

    def _await_message(self, deadline: float | None) -> bool:
        """False if none came by then, or if the connection has ended."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ends, zmq.POLLIN)
        ready = dict(poller.poll(None if deadline is None else _milliseconds_to(deadline)))
        # What came before the end counts.
        return self._socket in ready or bool(self._socket.poll(0))


class CurveKeys:
    """What a secret gives: the same on all ranks."""

    def __init__(self, secret: str) -> None:
        self._leader = z85.encode(_derive(secret, b"leader")) if secret else b""
        self.token = _derive(secret, b"token")

    def protect(self, socket: zmq.Socket[bytes], *, is_leader: bool) -> None:
        """Set the socket's CURVE keys."""
        if is_leader:
            socket.curve_server = True
            socket.curve_secretkey = self._leader
        else:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = zmq.curve_public(self._leader)


def _derive(secret: str, purpose: bytes) -> bytes:
    return hmac.digest(secret.encode(), purpose, "sha256")


def check_endpoint(endpoint: str, secret: str) -> None:
    """Raises ConfigurationError for an address at which strangers could listen or take part."""
    if endpoint.startswith("ipc://"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or host in EVERY_INTERFACE or not port.isdecimal() or port == "0":
        raise ConfigurationError(
            f"ranks cannot meet at {endpoint}: give tcp://ADDRESS:PORT of one interface of rank 0's machine"
        )
    if len(secret) < MIN_SECRET or not zmq.has("curve"):
        raise ConfigurationError(
            f"ranks meet at {endpoint} with a secret of {MIN_SECRET} characters or more, and with a libzmq that has "
            "CURVE"
        )


def _milliseconds_to(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))


def machine() -> str:
    """What tells machines apart, and containers of one machine."""
    return " ".join([BOOT_ID.read_text().strip(), *(os.readlink(namespace) for namespace in NAMESPACES)])
