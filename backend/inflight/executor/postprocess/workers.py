"""Postprocessing workers as their program sees them: responses in, the same responses with their text out.

Each request belongs to one worker, so its responses keep their order. A worker answers one message of tokens after the
other; the responses that wait for an answer stand in a queue here, so only tokens travel. If a worker ends, its
requests fail, and another one takes its place.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

from inflight.backoff import Backoff
from inflight.errors import ConfigurationError, EngineUnavailable
from inflight.executor.postprocess.messages import (
    Close,
    NewTokens,
    Open,
    Piece,
    Pieces,
    Tokens,
    ToWorker,
    encoder,
    from_worker,
)
from inflight.python_command import find_python, worker_environment
from inflight.request import Request
from inflight.result import Response

logger = logging.getLogger(__name__)

MODULE = "inflight.executor.postprocess.worker"
MAX_WORKERS = 64
START_SECONDS = 120.0
"""Time that a worker may take until it is ready."""

LAST_SECONDS = 5.0
"""Time for what is on its way when a worker is to end."""

Deliver = Callable[[Response, Piece], None]
Fail = Callable[[int, str], None]
"""(request id, sentence)"""
StartWorkers = Callable[[Deliver, Fail], "PostprocessWorkers"]


class PostprocessWorkers:
    """`open` and `forget` may be called from any thread, `put` from one."""

    def __init__(self, num_workers: int, folders: tuple[str, str], deliver: Deliver, fail: Fail) -> None:
        """Start them and wait until they are ready. `folders`: of the tokenizer and of the checkpoint. `deliver` and
        `fail` are called on a thread for each worker. Raises ConfigurationError."""
        self._workers: list[_Worker] = []
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(number, folders, deliver, fail))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def open(self, request: Request, stop: Sequence[str]) -> None:
        """Before the request is sent to the engine. Raises EngineUnavailable while its worker is being replaced."""
        message = Open(
            request_id=request.request_id,
            num_sequences=request.num_return_sequences,
            prompt_token_ids=request.input_token_ids,
            stop=list(stop),
            min_tokens=request.sampling_config.min_tokens,
            has_beams=request.sampling_config.beam_width > 1,
        )
        self._of(request.request_id).open(message)

    def forget(self, request_id: int) -> None:
        """Drop a request that the engine did not take."""
        self._of(request_id).forget(request_id)

    def put(self, responses: Sequence[Response]) -> None:
        """Deliver all of them, with their text, as soon as their workers have made it."""
        shares: dict[_Worker, list[Response]] = {}
        for response in responses:
            shares.setdefault(self._of(response.request_id), []).append(response)
        for worker, share in shares.items():
            worker.put(share)

    def close(self) -> None:
        """Wait for what is on its way, and end the processes."""
        for worker in self._workers:
            worker.finish()
        for worker in self._workers:
            worker.join()

    def pids(self) -> list[int]:
        """Process ids of the workers, in their order."""
        return [worker.pid for worker in self._workers]

    def _of(self, request_id: int) -> _Worker:
        return self._workers[request_id % len(self._workers)]


class _Worker:
    def __init__(self, number: int, folders: tuple[str, str], deliver: Deliver, fail: Fail) -> None:
        self._folders, self._deliver, self._fail = folders, deliver, fail
        self._lock = threading.Lock()
        self._open: set[int] = set()
        """Requests that the worker knows."""
        self._waiting: deque[list[Response]] = deque()
        """Of each message of tokens that was not answered yet."""
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._reason = ""
        self._absent = ""
        """Why there is no worker now."""
        self._start()
        self._thread = threading.Thread(target=self._run, name=f"inflight-postprocess-{number}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        if not self._ready.wait(START_SECONDS) or self._reason:
            raise ConfigurationError(f"a postprocessing worker did not start: {self._reason or 'it took too long'}")

    def open(self, message: Open) -> None:
        with self._lock:
            if self._absent:
                raise EngineUnavailable(self._absent)
            self._open.add(message.request_id)
            self._send(message)

    def forget(self, request_id: int) -> None:
        with self._lock:
            self._open.discard(request_id)
            self._send(Close(request_id))

    def put(self, responses: list[Response]) -> None:
        with self._lock:
            # The others have failed already, with the worker that knew them.
            known = [response for response in responses if response.request_id in self._open]
            if not known:
                return
            self._waiting.append(known)
            self._send(Tokens([_new_tokens(response) for response in known]))
            for response in known:
                if response.is_final:
                    self._open.discard(response.request_id)
                    self._send(Close(response.request_id))

    def finish(self) -> None:
        self._closing.set()
        with self._lock:
            self._shut(socket.SHUT_WR)

    def join(self) -> None:
        self._thread.join(LAST_SECONDS)
        self._process.kill()  # unless it has ended, as it should
        self._thread.join()
        self._connection.close()

    # -- the process ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [str(find_python()), "-m", MODULE, str(theirs.fileno()), *self._folders],
                env=worker_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        self._connection = Connection(ours.detach())

    def _send(self, message: ToWorker) -> None:
        """A worker that has ended is noticed where its answers are read."""
        try:
            self._connection.send_bytes(encoder.encode(message))
        except OSError:
            logger.debug("a postprocessing worker has ended")

    def _shut(self, how: int) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            try:
                end.shutdown(how)
            except OSError:
                logger.debug("a postprocessing worker has ended")

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff()
        while True:
            self._receive(backoff)
            self._process.wait()
            reason = f"a process that makes text of tokens ended with code {self._process.returncode}"
            if self._closing.is_set():
                return
            if not self._ready.is_set():
                self._reason = reason
                self._ready.set()
                return
            logger.error("%s; another one takes its place", reason)
            self._lose(reason)
            self._closing.wait(backoff.failed())
            with self._lock:
                self._connection.close()
                self._start()
                self._absent = ""
                if self._closing.is_set():
                    self._shut(socket.SHUT_WR)

    def _lose(self, reason: str) -> None:
        """Fail all requests that the worker knew; it takes no others until the next one has started."""
        with self._lock:
            self._absent = reason
            lost, self._open = self._open, set()
            # A request whose last response was on its way is known by that alone.
            lost |= {response.request_id for responses in self._waiting for response in responses}
            self._waiting.clear()
        for request_id in sorted(lost):
            self._fail(request_id, reason)

    def _receive(self, backoff: Backoff) -> None:
        """Until the worker ends."""
        while True:
            try:
                message = from_worker.decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            if isinstance(message, Pieces):
                for response, piece in zip(self._waiting.popleft(), message.pieces, strict=True):
                    self._deliver(response, piece)
            else:
                backoff.succeeded()
                self._ready.set()


def plan_workers(num_workers: int, tokenizer_dir: str, checkpoint: str) -> StartWorkers | None:
    """How to start so many workers with a checkpoint's tokenizer; None for 0. Raises ConfigurationError."""
    if not 0 <= num_workers <= MAX_WORKERS:
        raise ConfigurationError(f"num_postprocess_workers must be between 0 and {MAX_WORKERS}, got {num_workers}")
    return partial(PostprocessWorkers, num_workers, (tokenizer_dir, checkpoint)) if num_workers else None


def _new_tokens(response: Response) -> NewTokens:
    result = response.result
    if result is None:
        return NewTokens(response.request_id, 0, [], is_last=False)
    is_last = result.is_sequence_final or result.is_final
    return NewTokens(response.request_id, result.sequence_index, result.output_token_ids, is_last=is_last)
