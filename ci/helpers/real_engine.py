"""An engine with real ranks on the repository's own checkpoint, and functions that inspect its processes."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from inflight.config import EngineConfig
from inflight.executor.executor import make_launchers
from inflight.executor.front.remote import RemoteFront
from inflight.executor.wire.messages import Responses, decode_from_leader
from inflight.request import Request
from inflight.result import Array, Response, join_tensors
from inflight.run_directory import RUN_DIRECTORY
from inflight.sampling_config import SamplingConfig

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "llm" / "1" / "checkpoint"

PATIENCE = 480
"""Seconds after which something that should happen counts as never happening. 240 were too few once, for Ray's ranks
after a death, on two cores that ran three other files."""
IDLE_SECONDS = 3.0
"""For which processes are watched that should sleep."""
IDLE_SHARE = 0.2
"""Of one core. What a wake costs is the machine's affair, 20 to 400 us have been seen on one; this is enough to tell a
rank that never sleeps."""


class Engine:
    """An executor, with its responses collected by request."""

    def __init__(self, run_directory: Path, **parameters: str) -> None:
        """`run_directory`: what INFLIGHT_RUN_DIR names. `parameters`: as in config.pbtxt. Not started yet."""
        self._run_directory = run_directory
        small = {"max_batch_size": "8", "max_tokens_in_paged_kv_cache": "4096", "num_threads": "1"}
        self.config = EngineConfig.from_parameters(
            {"gpt_model_path": str(CHECKPOINT), "log_level": "WARNING", **small, **parameters}
        )
        self.deaths = threading.Semaphore(0)
        self.executor = RemoteFront(
            self.config, *make_launchers(self.config), on_engine_death=lambda reason: self.deaths.release()
        )
        self._mail: dict[int, list[Response]] = {}

    def submit(
        self, prompt: list[int], max_tokens: int, seed: int | None = None, streaming: bool = False, **options: Any
    ) -> int:
        """`options`: further fields of Request."""
        sampling = SamplingConfig() if seed is None else SamplingConfig(temperature=1.0, seed=seed)
        options.setdefault("sampling_config", sampling)
        request_id = self.executor.next_request_id()
        self.executor.enqueue_request(
            Request(
                request_id=request_id,
                input_token_ids=prompt,
                max_tokens=max_tokens,
                streaming=streaming,
                **options,
            )
        )
        self._mail[request_id] = []
        return request_id

    def wait(self, enough: Callable[[dict[int, list[Response]]], bool]) -> dict[int, list[Response]]:
        """All responses of all requests, by request id, once they are `enough`."""
        while not enough(self._mail):
            responses = self.executor.await_responses(timeout=PATIENCE)
            assert responses, "no response came"
            for response in responses:
                self._mail[response.request_id].append(response)
        return self._mail

    def wait_for_first(self, request_ids: list[int]) -> None:
        self.wait(lambda mail: all(mail[id_] for id_ in request_ids))

    def final(self, request_id: int) -> Response:
        """The last response of a request; there must be exactly one final one."""
        mail = self.wait(lambda mail: any(response.is_final for response in mail[request_id]))[request_id]
        assert [response.is_final for response in mail] == [False] * (len(mail) - 1) + [True]
        return mail[-1]

    def tokens(self, request_id: int, sequence_index: int = 0) -> list[int]:
        """All tokens of one sequence of a request that ends well."""
        final = self.final(request_id)
        assert final.result is not None, final.error_msg
        results = [response.result for response in self._mail[request_id] if response.result]
        mine = [result for result in results if result.sequence_index == sequence_index]
        return [token for result in mine for token in result.output_token_ids]

    def tensors(self, request_id: int) -> dict[str, Array]:
        """All tensors of a request that ends well."""
        self.tokens(request_id)
        return join_tensors(response.result for response in self._mail[request_id] if response.result)

    def generate(self, prompts: list[list[int]], max_tokens: int, seed: int | None = None) -> list[list[int]]:
        """Tokens of each prompt, all in flight at once."""
        return [self.tokens(id_) for id_ in [self.submit(prompt, max_tokens, seed) for prompt in prompts]]

    def wait_until_ready(self) -> None:
        changed = self.executor._changed
        with changed:
            assert changed.wait_for(self.executor.is_ready, PATIENCE), "the ranks were not launched again"

    def endpoint(self) -> str:
        """The leader's address, for another front."""
        (path,) = self._run_directory.glob("*/engine.sock")
        return f"ipc://{path}"

    def rank_pid(self, rank: int) -> int:
        return rank_pids(self.executor.engine_pids())[rank]


StartEngine = Callable[..., Engine]


@contextmanager
def starting() -> Iterator[StartEngine]:
    """Starts engines, and ends them: no process and no file of theirs may be left. (That they share no memory
    with a name, has a test of its own: in /dev/shm other tests' ranks come and go.)"""
    engines: list[Engine] = []
    run_directory = Path(tempfile.mkdtemp(prefix="run-"))  # a name that is short enough for a socket's address

    def start(**parameters: str) -> Engine:
        engine = Engine(run_directory, **parameters)
        engines.append(engine)
        engine.executor.start()
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, str(run_directory))
        try:
            yield start
        finally:
            for engine in engines:
                engine.executor.shutdown()
    assert [engine.executor.engine_pids() for engine in engines] == [[] for _ in engines]
    assert list(run_directory.iterdir()) == []
    shutil.rmtree(run_directory)


def rank_pids(pids: list[int]) -> dict[int, int]:
    """rank -> pid, from what its launcher put into each rank's environment; launchers themselves are left out."""
    ranks: dict[int, int] = {}
    for pid in pids:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        environment = dict(item.split(b"=", 1) for item in variables if b"=" in item)
        for variable in (b"INFLIGHT_RANK", b"PMI_RANK", b"PMIX_RANK", b"OMPI_COMM_WORLD_RANK"):
            if environment.get(variable) and b"inflight.worker" in command:
                ranks[int(environment[variable])] = pid
    return ranks


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def num_wakes(pids: list[int]) -> int:
    """How often their threads slept and woke so far."""
    wakes = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            wakes += int(status["voluntary_ctxt_switches"])
    return wakes


def wait_until_idle(pids: list[int], wakes: float, share: float) -> None:
    """Until these processes, for IDLE_SECONDS, wake `wakes` times a second at most and use `share` of a core. What they
    still had to do may take a few such times; ranks that tick never get there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        begin, seconds, before = time.monotonic(), cpu_seconds(pids), num_wakes(pids)
        time.sleep(IDLE_SECONDS)
        elapsed = time.monotonic() - begin
        found = (num_wakes(pids) - before) / elapsed, (cpu_seconds(pids) - seconds) / elapsed
        if found[0] < wakes and found[1] < share:
            return
        assert time.monotonic() < deadline, f"{found[0]:.1f} wakes a second, {found[1]:.2f} of a core"


def listening_addresses(pid: int) -> set[str]:
    """Addresses on which a process accepts TCP connections or holds a bound UDP socket."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    shown = subprocess.run(["ss", "-Hltune"], capture_output=True, text=True, check=True).stdout
    addresses = set()
    for line in shown.splitlines():
        words = line.split()
        if any(word.startswith("ino:") and word[4:] in inodes for word in words):
            addresses.add(words[4].rpartition(":")[0].strip("[]").partition("%")[0])
    return addresses


def mapped_files(pid: int) -> set[str]:
    """Mapped files of a process, deleted ones included."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}


def wait_for_end(pid: int) -> None:
    """Until the process `pid`, which is no child of ours, is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), f"process {pid} did not end"
    os.close(descriptor)


def receive_tokens(socket: Any, request_id: int) -> list[int]:
    """All tokens of a request, as the leader sends them to `socket`, a zmq DEALER."""
    tokens: list[int] = []
    while True:
        message = decode_from_leader(socket.recv())
        for response in message.responses if isinstance(message, Responses) else []:
            assert response.request_id == request_id
            assert response.result is not None, response.error_msg
            tokens += response.result.output_token_ids
            if response.is_final:
                return tokens
