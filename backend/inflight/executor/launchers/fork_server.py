"""The front's side of the process that its ranks are forked from (rank/fork_server.py): starts it and asks it.

A rank that is started imports for a second or two before it loads anything. One that is forked does not, so that its
streams go on that much sooner after a death.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from inflight.config import EngineConfig
from inflight.executor.launchers.stopped_processes import SHARE, StoppedProcesses
from inflight.executor.wire.forks import (
    MAX_MESSAGE_BYTES,
    ROOM,
    ROOM_BYTES,
    CannotFork,
    Ended,
    Fork,
    Forked,
    FromServer,
    Ready,
    Reap,
    ToServer,
    decode_from_server,
    encode,
)
from inflight.python_command import find_python, worker_environment

PROGRAM = ("-m", "inflight.executor.rank.fork_server")
ANSWER_SECONDS = 5.0
"""After which a server does not answer: it was suspended, say."""
NVIDIA_DEVICES = "/dev/nvidiactl"
"""There where NVIDIA's driver is loaded."""


class ForkServer:
    """To be used from one thread, which must outlive the ranks: the server is killed when it ends, and ranks with it.

    Its environment is that of this process when it was started: libraries read theirs when they are loaded.
    """

    def __init__(self) -> None:
        self._server: Server | None = None
        self._silent: list[Server] = []
        """Those that did not answer. Their ranks may serve, and would end with them."""

    def is_ready(self, seconds: float) -> bool:
        """Whether ranks can be forked, after at most so much time; starts the server if there is none. Raises OSError
        if it cannot be started, or has ended or been stopped without becoming ready."""
        self._set_aside_if_silent()
        if self._server is None or self._server.has_ended():
            self._end_server()
            self._server = Server()
        try:
            return self._server.is_ready(seconds)
        except OSError:
            self._end_server()
            raise

    def fork(self, environment: Mapping[str, str]) -> ForkedProcess:
        """A rank, with at most ROOM_BYTES of variables that the server does not have. Only once `is_ready`. Raises
        OSError if the server does not answer; the next one is another."""
        assert self._server is not None, "nobody has asked whether it is ready"
        try:
            answer = self._server.ask(Fork(dict(environment.items() - self._server.environment.items())))
        except TimeoutError:
            self._set_aside_if_silent()
            raise OSError(f"the process that ranks are forked from did not answer for {ANSWER_SECONDS:g} s") from None
        if not isinstance(answer, Forked):
            raise OSError(f"a rank cannot be forked: {answer.reason if isinstance(answer, CannotFork) else answer}")
        return self._server.add(answer.pid)

    def close(self) -> None:
        """End the servers, and ranks that are left."""
        self._end_server()
        while self._silent:
            self._silent.pop().end()

    def _set_aside_if_silent(self) -> None:
        if self._server is not None and self._server.is_silent:
            self._silent.append(self._server)
            self._server = None
        for server in [server for server in self._silent if not server.has_ranks()]:
            self._silent.remove(server)
            server.end()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None


class Server:
    """One process that ranks are forked from. The constructor starts it. Methods raise OSError if it ends."""

    def __init__(self) -> None:
        self.environment = worker_environment(os.environ)
        self.is_silent = False
        """Whether an answer did not come in time. It may come yet, as if it were that of the next message."""
        self._is_ready = False
        self._ranks: list[ForkedProcess] = []
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_failure, other:
            on_failure.callback(self._channel.close)
            self._process = subprocess.Popen(
                [str(find_python()), *PROGRAM, str(other.fileno())],
                env={
                    **self.environment,
                    ROOM: "-" * ROOM_BYTES,
                    "OPENBLAS_NUM_THREADS": "1",  # numpy's would start its threads when it is imported
                },
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
            on_failure.pop_all()
        self._stopped = StoppedProcesses(lambda: [self._process.pid], ANSWER_SECONDS / SHARE)

    def is_ready(self, seconds: float) -> bool:
        if not self._is_ready:
            self._channel.settimeout(seconds)
            try:
                self._is_ready = isinstance(self._receive(), Ready)
            except TimeoutError:
                if self._stopped.look() is not None:
                    raise OSError(
                        "the process that ranks are forked from has been stopped by a signal for "
                        f"{self._stopped.patience:g} s"
                    ) from None
                return False
        return True

    def ask(self, message: ToServer) -> FromServer:
        """The answer. Raises TimeoutError if there is none in time; from then on at once."""
        if self.is_silent:
            raise TimeoutError
        self._channel.settimeout(ANSWER_SECONDS)
        try:
            self._channel.send(encode(message))
            return self._receive()
        except TimeoutError:
            self.is_silent = True
            raise

    def add(self, pid: int) -> ForkedProcess:
        """The rank that it has forked. Raises OSError if it cannot be watched, and is killed."""
        rank = ForkedProcess(pid, self)
        self._ranks = [*(other for other in self._ranks if other.poll() is None), rank]
        return rank

    def has_ranks(self) -> bool:
        """Whether one of them runs."""
        return any(rank.poll() is None for rank in self._ranks)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> FromServer:
        data = self._channel.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise OSError(f"the process that ranks are forked from ended with exit code {self._process.wait()}")
        return decode_from_server(data)


class ForkedProcess:
    """A rank, with what of subprocess.Popen is used of it."""

    def __init__(self, pid: int, server: Server) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended with its server
            pass
        except OSError:  # such as no descriptor left
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._reap()
            raise

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._code if self._is_running(0) else self._reap()

    def wait(self) -> int:
        """The exit code, once it has ended."""
        self._is_running(None)
        return self._reap()

    def kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _is_running(self, timeout_ms: int | None) -> bool:
        if self._pidfd is None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(timeout_ms)

    def _reap(self) -> int:
        if self._code is None:
            self._code = -signal.SIGKILL  # if the server has ended, and with it its ranks
            with contextlib.suppress(OSError):
                answer = self._server.ask(Reap(self.pid))
                if isinstance(answer, Ended):
                    self._code = answer.code
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        return self._code


def can_fork(config: EngineConfig) -> bool:
    """Whether ranks are forked. Those that may use a GPU are not: it was never tried with one."""
    return config.device == "cpu" or (config.device == "auto" and not Path(NVIDIA_DEVICES).exists())
