"""Fetches the blocks of prompts that other engines have computed, this rank's part of each, and tells the leader.

Each prompt is fetched by a thread of a few, which waits for the other rank and not for steps. Memory of the same
machine is mapped as it is; what comes over the network is received into memory of its own. Knows no requests.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import zmq

from inflight.distributed.sockets import KEEPALIVE, CurveKeys
from inflight.executor.wire.block_messages import (
    BlockFetch,
    Endpoint,
    Fetch,
    Fetched,
    FromSender,
    Gone,
    Payload,
    Serves,
    Shared,
    Taken,
    encode_block_message,
    from_sender,
)

if TYPE_CHECKING:
    from inflight.runtime.prompt_blocks import PromptBlocks

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Prompts that are fetched at once."""
MAX_HEADER_BYTES = 4096
LINGER_MS = 1000
ENDS = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""What happens to a connection to a rank that is not there, or not any more."""


class NotFetched(Exception):
    """The blocks of a prompt could not be fetched; the message says why."""


class BlockReceiver:
    def __init__(self, blocks: PromptBlocks, *, rank: int, reports: str, keys: CurveKeys, timeout_ms: int) -> None:
        """`reports`: endpoint at which the leader is told of what has come. `timeout_ms`: of a fetch, which may have to
        wait for others first."""
        self._blocks = blocks
        self._rank = rank
        self._keys = keys
        self._timeout = timeout_ms / 1000
        self._context = zmq.Context()
        # Stays open: what is told while the leader is suspended, or does not listen yet, waits for it.
        self._leader: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._leader.set(zmq.SNDHWM, 0)
        self._leader.connect(reports)
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}  # request id -> number of its fetch
        self._threads = ThreadPoolExecutor(NUM_THREADS, "inflight-kv-receiver")

    def introduce(self, endpoint: Endpoint) -> None:
        """Tell the leader where this rank's own blocks are fetched."""
        self._tell(Serves(self._rank, endpoint))

    def begin(self, fetch: BlockFetch) -> None:
        """Fetch it, and report; does not wait."""
        with self._lock:
            self._wanted[fetch.request_id] = fetch.number
        self._threads.submit(self._run, fetch, time.monotonic() + self._timeout)

    def drop(self, request_id: int) -> None:
        """Whatever has come for the request, or is still to come, is not needed any more."""
        with self._lock:
            self._wanted.pop(request_id, None)
            self._blocks.drop(request_id)

    def close(self) -> None:
        with self._lock:
            self._wanted.clear()
            self._leader.close(linger=0)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._context.term()  # whoever waits in a socket leaves it now
        self._threads.shutdown()

    def _run(self, fetch: BlockFetch, deadline: float) -> None:
        has_arrived = False
        try:
            memory = self._fetch(fetch, deadline)
            with self._lock:
                has_arrived = self._wanted.get(fetch.request_id) == fetch.number
                if has_arrived:
                    self._blocks.arrive(fetch.request_id, memory)
        except (NotFetched, zmq.ZMQError, OSError) as error:
            logger.warning("the blocks of a prompt were not fetched, and are computed here: %s", error)
        except Exception:
            logger.exception("the blocks of a prompt were not fetched, and are computed here")
        self._tell(Fetched(self._rank, fetch.request_id, fetch.number, has_arrived))

    def _tell(self, message: Serves | Fetched) -> None:
        """Tell the leader, unless this rank ends."""
        with self._lock:
            if not self._leader.closed:
                self._leader.send(encode_block_message(message))

    def _fetch(self, fetch: BlockFetch, deadline: float) -> mmap.mmap | bytearray:
        """This rank's part, by `deadline` on the monotonic clock. Raises NotFetched, ZMQError or OSError."""
        endpoint = fetch.endpoints[self._rank]
        place = endpoint.local if fetch.is_local else endpoint.remote
        if not place:
            raise NotFetched("they are on another machine, whose ranks have no kv_transfer_interface")
        num_bytes = self._blocks.num_bytes(fetch.num_blocks)
        # What comes over the network is in a message first, and then in memory of its own.
        if not fetch.is_local and not self._blocks.has_memory(2 * num_bytes):
            raise NotFetched("there is no memory for them")
        with self._context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, LINGER_MS)
            socket.set(zmq.MAXMSGSIZE, num_bytes + MAX_HEADER_BYTES)
            if not fetch.is_local:
                for option, value in KEEPALIVE.items():
                    socket.set(option, value)
                self._keys.protect(socket, is_leader=False)
            ends = socket.get_monitor_socket(ENDS)
            try:
                socket.connect(place)
                socket.send(encode_block_message(Fetch(fetch.key, fetch.is_local)))
                message, payload = self._receive(socket, ends, deadline)
                memory = self._memory(message, payload, num_bytes)
                socket.send(encode_block_message(Taken(fetch.key)))
            finally:
                socket.disable_monitor()
                ends.close()
        return memory

    @staticmethod
    def _receive(
        socket: zmq.Socket[bytes], ends: zmq.Socket[bytes], deadline: float
    ) -> tuple[FromSender, zmq.Frame | None]:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(ends, zmq.POLLIN)
        ready = dict(poller.poll(max(int((deadline - time.monotonic()) * 1000), 0)))
        if socket not in ready and not socket.poll(0):
            raise NotFetched("the rank that has them is gone" if ready else "the rank that has them does not answer")
        header, *frames = socket.recv_multipart(copy=False)
        try:
            return from_sender.decode(header.bytes), frames[0] if frames else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NotFetched("the answer is not a message") from None

    @staticmethod
    def _memory(message: FromSender, payload: zmq.Frame | None, num_bytes: int) -> mmap.mmap | bytearray:
        if isinstance(message, Gone):
            raise NotFetched("they waited too long, or were fetched before")
        if isinstance(message, Shared):
            return _map(message, num_bytes)
        assert isinstance(message, Payload)
        if payload is None or len(payload.buffer) != num_bytes:
            raise NotFetched("another number of bytes has come")
        return bytearray(payload.buffer)


def _map(shared: Shared, num_bytes: int) -> mmap.mmap:
    """Map another process's memory. Raises NotFetched or OSError."""
    descriptor = os.open(shared.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (shared.device, shared.inode) or status.st_size != num_bytes:
            raise NotFetched("they waited too long, and their memory belongs to others")
        # Private: what is read stays as it is for whoever else has mapped it.
        return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
