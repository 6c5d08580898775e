"""Sockets between the ranks of one pipeline: frames of bytes, in order. Knows neither tensors nor steps.

        rank A                                                   rank B
    send() ── 8 bytes: length, little endian ── the bytes ──>  a thread reads whole frames  ──> receive()

Each pair of ranks has one socket. A thread reads the frames as they come, so that a rank that computes keeps no sender
waiting; it sleeps while nothing comes. On one machine the sockets are Unix sockets with random abstract names, so no
file stays behind however ranks end. Between machines they are TCP sockets on each machine's own address only. Whoever
connects shows a secret first, which the leader has told the ranks; other connections are closed, and one that says
nothing keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from torch.distributed import Store  # type: ignore[attr-defined]

from inflight.distributed.host_address import host_address
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.rendezvous import RENDEZVOUS_TIMEOUT, tcp_store

SECRET_BYTES = 32
NUMBER_BYTES = 8
"""Of the length of a frame, and of a rank in a greeting."""
GREETING_BYTES = SECRET_BYTES + NUMBER_BYTES
MAX_STRANGERS = 64
"""Connections that have not shown the secret yet; of more, the oldest are closed. A rank shows it at once."""

Buffer = bytes | bytearray | memoryview


class StageLink:
    """This rank's end of the socket to one other rank."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        """`peer`: the other rank's number."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._peer = peer
        self._lock = threading.Lock()
        self._frames: deque[bytearray] = deque()
        self._waiting: deque[Future[bytearray]] = deque()
        self._ended: Exception | None = None
        self._thread = threading.Thread(target=self._read, name=f"inflight-from-rank-{peer}", daemon=True)
        self._thread.start()

    def send(self, frame: Buffer) -> None:
        """One thread at a time. Raises OSError if the other rank is gone."""
        view = memoryview(frame).cast("B")
        self._socket.sendall(len(view).to_bytes(NUMBER_BYTES, "little"))
        self._socket.sendall(view)

    def receive(self) -> Future[bytearray]:
        """The next frame that nobody has asked for yet; it raises ConnectionError if the other rank is gone."""
        future: Future[bytearray] = Future()
        with self._lock:
            if self._frames:
                future.set_result(self._frames.popleft())
            elif self._ended is not None:
                future.set_exception(self._ended)
            else:
                self._waiting.append(future)
        return future

    def close(self) -> None:
        _shut_down(self._socket)
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        try:
            while True:
                length = int.from_bytes(_read_exactly(self._socket, NUMBER_BYTES), "little")
                self._take(_read_exactly(self._socket, length))
        except OSError as error:
            with self._lock:
                self._ended = ConnectionError(f"the connection to rank {self._peer} has ended: {error}")
                for future in self._waiting:
                    future.set_exception(self._ended)
                self._waiting.clear()

    def _take(self, frame: bytearray) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set_result(frame)
            else:
                self._frames.append(frame)


def connect_stages(rank_group: RankGroup, ranks: Sequence[int]) -> dict[int, StageLink]:
    """A link to each other rank of `ranks`, this rank's pipeline from the first stage on, by its number.

    Collective over `rank_group`. Raises OSError if a rank cannot be reached."""
    own = rank_group.rank
    secret = rank_group.broadcast(secrets.token_bytes(SECRET_BYTES) if own == 0 else None)
    name = hmac.digest(secret, b"name", "sha256").hex()  # which everybody on this machine may see
    store = tcp_store(rank_group) if rank_group.several_hosts else None
    sockets: dict[int, socket.socket] = {}
    with _listen(name, own, store) as listener:
        rank_group.barrier()  # everybody listens
        for peer in ranks[: ranks.index(own)]:
            sockets[peer] = _connect(name, peer, store)
            sockets[peer].sendall(secret + own.to_bytes(NUMBER_BYTES, "little"))
        deadline = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
        with contextlib.closing(_Greetings(listener, secret)) as greetings:
            while len(sockets) < len(ranks) - 1:
                peer, connection = greetings.next_rank(deadline)
                if peer in ranks and peer not in sockets:
                    sockets[peer] = connection
                else:
                    connection.close()
    rank_group.barrier()  # nobody needs the store any more
    for each in sockets.values():
        each.settimeout(None)
    return {peer: StageLink(each, peer) for peer, each in sockets.items()}


def _listen(name: str, rank: int, store: Store | None) -> socket.socket:
    """`store`: where ranks of other machines find the address; None = all are on this one."""
    if store is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_abstract(name, rank))
        listener.listen()
    else:
        host = host_address()
        listener = socket.create_server((host, 0))
        store.set(f"stage-{rank}", f"{host}:{listener.getsockname()[1]}")
    listener.setblocking(False)
    return listener


def _connect(name: str, rank: int, store: Store | None) -> socket.socket:
    """Connect to a rank that listens."""
    if store is None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(_abstract(name, rank))
        return connection
    host, _, port = store.get(f"stage-{rank}").decode().rpartition(":")
    return socket.create_connection((host, int(port)), RENDEZVOUS_TIMEOUT.total_seconds())


def _abstract(name: str, rank: int) -> bytes:
    """The name of a rank's Unix socket, which is no file's."""
    return f"\0inflight-{name}-{rank}".encode()


class _Greetings:
    """Connections that have not shown the secret yet. All are heard beside each other."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._said: dict[socket.socket, bytearray] = {}
        """By connection, the oldest first."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def next_rank(self, deadline: float) -> tuple[int, socket.socket]:
        """The next one that shows it, with the rank that it says it is. Raises TimeoutError at `deadline`."""
        while (seconds := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(seconds):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._take()
                elif connection in self._said and (rank := self._hear(connection)) is not None:
                    return rank, connection
        raise TimeoutError("a rank of the same pipeline has not connected in time")

    def close(self) -> None:
        for connection in list(self._said):
            self._release(connection)
            connection.close()
        self._selector.close()

    def _take(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        connection.setblocking(False)
        self._said[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._said) > MAX_STRANGERS:
            oldest = next(iter(self._said))
            self._release(oldest)
            oldest.close()

    def _hear(self, connection: socket.socket) -> int | None:
        """None if it has not said everything yet, or is closed because that was wrong."""
        greeting = self._said[connection]
        try:
            said = connection.recv(GREETING_BYTES - len(greeting))
        except OSError:
            said = b""
        greeting += said
        if said and len(greeting) < GREETING_BYTES:
            return None
        self._release(connection)
        if hmac.compare_digest(bytes(greeting[:SECRET_BYTES]), self._secret) and len(greeting) == GREETING_BYTES:
            return int.from_bytes(greeting[SECRET_BYTES:], "little")
        connection.close()
        return None

    def _release(self, connection: socket.socket) -> None:
        del self._said[connection]
        self._selector.unregister(connection)


def _read_exactly(sock: socket.socket, size: int) -> bytearray:
    """Raises OSError if the connection ends before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionResetError("it was closed")
        view = view[count:]
    return data


def _shut_down(sock: socket.socket) -> None:
    """Let both ends' readers find the end."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other rank has gone first
