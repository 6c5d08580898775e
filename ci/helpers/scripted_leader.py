"""A program in place of a rank: it sends a leader's messages, and dies, hangs or sends garbage if a request asks so.

    python scripted_leader.py BEHAVIOUR FOLDER       started by an executor; FOLDER is where it counts launches

Every token it sends is its own process id, so that a test sees which launch answered. No engine, no torch.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

import zmq

from inflight.engine_description import EngineDescription
from inflight.executor.wire.launch import Launch
from inflight.executor.wire.messages import (
    Cancel,
    Fatal,
    FromLeader,
    Heartbeat,
    Hello,
    Responses,
    Shutdown,
    Started,
    Stats,
    Submit,
    Welcome,
    decode_from_front,
    encode,
)
from inflight.parent_watch import die_with_parent
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result

LIMITS = RequestLimits(vocab_size=100, max_seq_len=64, max_input_len=63, kv_cache_tokens=640)
MAX_IN_FLIGHT = 4
HEARTBEAT_MS = 50
FAILURE = "the checkpoint has no layers"
NONSENSE = (b"", b"\xc1", b"\x80", encode(Hello(front_id=1, pid=1)), b"\x93\x01\x02\x03", bytes(100_000))


class Order(IntEnum):
    """What a request's first prompt token asks for. A replay of HOLD, EXIT or FATAL is answered as ANSWER."""

    ANSWER = 1
    """One token, then another with the end."""
    HOLD = 2
    """One token, then nothing."""
    EXIT = 3
    """One token, then end this process."""
    FATAL = 4
    """One token, then say that the ranks end."""
    NONSENSE = 5
    """Bytes that are no message and answers to requests that nobody made; then one token and the end, twice."""
    STATS = 6
    """Two statistics, then as ANSWER."""
    POISON = 7
    """End this process, at a replay, too."""


class FakeLeader:
    def __init__(self, launch: Launch, deaf_to_shutdown: bool) -> None:
        self._deaf = deaf_to_shutdown
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{launch.socket_path}")
        self._front = b""

    def run(self) -> None:
        while True:
            while not self._socket.poll(HEARTBEAT_MS):
                self._say(Heartbeat())
            self._front, frame = self._socket.recv_multipart()
            message = decode_from_front(frame)
            if isinstance(message, Hello):
                self._say(
                    Welcome(
                        limits=LIMITS,
                        description=EngineDescription(device="cuda"),
                        max_in_flight=MAX_IN_FLIGHT,
                        pid=os.getpid(),
                    )
                )
            elif isinstance(message, Submit):
                for request in message.requests:
                    self._obey(request)
            elif isinstance(message, Cancel):
                self._say(Responses([_result(id_, FinishReason.CANCELLED) for id_ in message.request_ids]))
            elif isinstance(message, Shutdown) and not self._deaf:
                return

    def _obey(self, request: Request) -> None:
        order, request_id = Order(request.input_token_ids[0]), request.request_id
        if request.replay is not None and order in (Order.HOLD, Order.EXIT, Order.FATAL):
            order = Order.ANSWER
        self._say(Started([request_id]))
        if order is Order.POISON:
            self._exit()
        if order is Order.NONSENSE:
            for frame in NONSENSE:
                self._socket.send_multipart([self._front, frame])
            self._say(Responses([_result(request_id + 1000), _result(request_id + 1000, FinishReason.LENGTH)]))
            self._say(Responses([_result(request_id, FinishReason.LENGTH)] * 2))
            return
        if order is Order.STATS:
            self._say(Stats('{"Iteration Counter": 1}'))
            self._say(Stats('{"Iteration Counter": 2}'))
        self._say(Responses([_result(request_id)]))
        if order in (Order.ANSWER, Order.STATS):
            self._say(Responses([_result(request_id, FinishReason.LENGTH)]))
        elif order is Order.FATAL:
            self._say(Fatal("rank 1 has no more memory"))
        elif order is Order.EXIT:
            self._exit()

    @staticmethod
    def _exit() -> None:
        zmq.Context.instance().destroy(linger=1000)
        os._exit(3)

    def _say(self, message: FromLeader) -> None:
        if self._front:
            self._socket.send_multipart([self._front, encode(message)])


def _result(request_id: int, finish: FinishReason = FinishReason.NOT_FINISHED) -> Response:
    final = finish is not FinishReason.NOT_FINISHED
    result = Result(output_token_ids=[os.getpid()], finish_reason=finish, is_final=final, is_sequence_final=final)
    return Response(request_id=request_id, result=result)


def _lose_a_rank(launch: Launch) -> None:
    """As a launcher that does not end with its rank, which dies while the ranks build their connections."""
    if os.fork() == 0:
        tempfile.mkdtemp(prefix="inflight-ranks-")
        launch.note_rank(1)
        os.kill(os.getpid(), signal.SIGKILL)
    zmq.Context.instance().socket(zmq.PULL).poll()


def main(behaviour: str, folder: Path) -> int:
    launch = Launch.from_environment()
    die_with_parent(launch.front_pid)
    Path(folder, str(os.getpid())).touch()
    num_launches = len(list(folder.iterdir()))
    if behaviour == "fail":
        launch.note_failure(FAILURE)
        return 1
    if behaviour == "refuse again" and num_launches > 1:
        launch.note_failure(FAILURE, is_misconfigured=True)
        return 1
    if behaviour == "exit" or (behaviour == "serve once" and num_launches > 1):
        return 3
    if behaviour == "fail three times" and 1 < num_launches <= 4:
        return 3
    if behaviour == "never ready" or (behaviour == "never ready again" and num_launches > 1):
        while True:
            zmq.Context.instance().socket(zmq.PULL).poll()
    if behaviour == "lose a rank":
        _lose_a_rank(launch)
    launch.note_rank(0)
    FakeLeader(launch, deaf_to_shutdown=behaviour == "deaf").run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
