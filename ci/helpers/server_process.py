"""A real, supervised tritonserver for tests: started on free ports, ended with everything that belongs to it.

    with ServerProcess(model_repository=folder, parameters={"tensor_parallel_size": "2"}) as server:
        client = Client(server.grpc_url)

The server runs under the same supervisor as `inflight serve`, in a process of its own, so that tests can signal and
kill it. Knows nothing of the models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from free_ports import free_port

from inflight.hub.model_name import find_name
from inflight.openai_options import OpenAIOptions
from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import processes
from inflight.supervisor.options import Endpoints, ServeOptions
from inflight.supervisor.serve import serve
from inflight.supervisor.served_model import of_arguments

ROOT = Path(__file__).resolve().parents[2]
MODEL_REPOSITORY = ROOT / "model_repository"
SMALL_CACHE = {"max_tokens_in_paged_kv_cache": "65536"}
"""Half of what the default model takes by itself: each start of its ranks zeroes the memory. Enough for 24 requests of
1,800 tokens that are in flight together."""
CHECKED = {"guided_decoding_check": "true"}
"""Guided answers are held against their guides, whatever a test looks at."""
START_DEADLINE = 300.0
STOP_DEADLINE = 180.0


class ServerFailed(Exception):
    """The server ended before it was ready; the message is what it printed."""


class ServerProcess:
    """`options` are those of ServeOptions, `openai` as a dictionary. Ports are free ones unless named, the log goes to
    a file, and the default model has a SMALL_CACHE and is CHECKED."""

    def __init__(self, **options: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="inflight-test-")
        self._log_path = Path(self._directory.name, "server.log")
        self._told_path = Path(self._directory.name, "supervisor.log")
        # Tests that count requests must know all of them, so there are no canaries unless a test asks for them.
        # And none adopts the server of another one that was killed.
        usual = {name: free_port() for name in ("http_port", "grpc_port", "metrics_port")}
        usual |= {"canary_period": 0.0, "adopt_timeout": 0.0, "log_file": str(self._log_path)}
        # Several `models` are texts of a command line, [NAME=]MODEL; `shares` are theirs.
        if "model_repository" not in options:
            usual["parameters"] = {**SMALL_CACHE, **CHECKED, **options.pop("parameters", {})}
        self.options: dict[str, Any] = {**usual, **options}
        if openai := options.get("openai"):
            self.options["openai"] = {**openai, "port": openai.get("port") or free_port()}
        self.process: subprocess.Popen[bytes] | None = None
        self.endpoints: Endpoints | None = None

    def __enter__(self) -> ServerProcess:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"---- supervisor\n{self.told}\n---- server log, its end\n{self.log[-8000:]}", file=sys.stderr)
        failed = "does not follow its guide" in self.log
        self.close()
        assert not failed or error is not None, "a guided answer does not follow its guide"

    def start(self) -> ServerProcess:
        """Launch and wait until ready. Raises ServerFailed if it ends first."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> ServerProcess:
        """Launch without waiting."""
        reading, writing = os.pipe()
        options = {key: str(value) if isinstance(value, Path) else value for key, value in self.options.items()}
        arguments = json.dumps({"ready_descriptor": writing, **options})
        environment = {name: value for name, value in os.environ.items() if name != RUN_DIRECTORY}
        sources = [str(ROOT / folder) for folder in ("backend", "kernels", "client")]
        environment["PYTHONPATH"] = os.pathsep.join([*sources, *filter(None, [environment.get("PYTHONPATH")])])
        with self._told_path.open("ab") as told:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), arguments],
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
                pass_fds=[writing],
                env=environment,
                start_new_session=True,
            )
        os.close(writing)
        self._ready_pipe = reading
        return self

    def wait_ready(self) -> ServerProcess:
        line = _read_line(self._ready_pipe, START_DEADLINE)
        os.close(self._ready_pipe)
        if not line:
            raise ServerFailed(self.told + self.log[-4000:])
        values = json.loads(line)
        self.endpoints = Endpoints(**{**values, "run_directory": Path(values["run_directory"])})
        return self

    def close(self) -> None:
        """End it at once, and remove the logs. For a test that is about the end: `stop` takes the seconds in which
        tritonserver ends by itself."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.stop()  # by another signal: of two equal ones that are pending, one is lost
        self._directory.cleanup()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the supervisor and wait; its exit code."""
        process = self.process
        assert process is not None
        process.send_signal(number)
        try:
            return process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    @property
    def ready_endpoints(self) -> Endpoints:
        assert self.endpoints is not None, "the server is not ready"
        return self.endpoints

    @property
    def grpc_url(self) -> str:
        return self.ready_endpoints.grpc

    @property
    def http_url(self) -> str:
        """With the scheme: "http://host:port"."""
        return f"http://{self.ready_endpoints.http}"

    @property
    def openai_url(self) -> str:
        """With the scheme and without a path."""
        return f"http://{self.ready_endpoints.openai}"

    @property
    def openai_pid(self) -> int:
        """Of the OpenAI server."""
        return next(pid for pid in self.pids if b"inflight.http" in command_of(pid))

    @property
    def metrics_url(self) -> str:
        """With scheme and path."""
        return f"http://{self.ready_endpoints.metrics}/metrics"

    @property
    def log(self) -> str:
        """tritonserver's whole log so far, with what stubs and ranks printed."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    @property
    def told(self) -> str:
        """The supervisor's output to its terminal."""
        return self._told_path.read_text(errors="replace") if self._told_path.exists() else ""

    @property
    def pids(self) -> list[int]:
        """Every living process below the supervisor: tritonserver, stubs, launchers, ranks."""
        return processes.marked(self.ready_endpoints.run_directory)

    @property
    def tritonserver_pid(self) -> int:
        return next(pid for pid in self.pids if _program(pid) == "tritonserver")

    @property
    def stub_pids(self) -> dict[int, str]:
        """pid -> instance name."""
        return processes.stubs(self.tritonserver_pid)

    @property
    def ranks(self) -> list[int]:
        """Pids of the engines' ranks that live, those that load included."""
        found = [pid for pid in self.pids if is_rank(pid)]
        # A process that a rank starts has its command line until it becomes another program.
        return [pid for pid in found if _parent(pid) not in found]

    @property
    def lasting_pids(self) -> set[int]:
        """Of the processes that live as long as nothing goes wrong: tritonserver, its stubs, the ranks."""
        return {self.tritonserver_pid, *self.stub_pids, *self.ranks}

    @contextlib.contextmanager
    def hold_ranks(self) -> Iterator[None]:
        """All ranks stand still meanwhile, so that no request makes progress. For servers whose
        worker_heartbeat_timeout_ms is long: after a part of it, ranks that a signal has stopped are replaced."""
        held = self.ranks
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in held:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @property
    def shared_memory(self) -> list[Path]:
        name = self.ready_endpoints.run_directory.name.replace("-", "_", 1)
        return sorted(Path("/dev/shm").glob(f"{name}_*"))


@contextlib.contextmanager
def server_that_stays(**options: Any) -> Iterator[ServerProcess]:
    """One whose processes all live on to its end."""
    with ServerProcess(**options) as running:
        processes = running.lasting_pids
        yield running
        assert processes <= set(running.pids), "a process of the server died on the way"


def _program(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def command_of(pid: int) -> list[bytes]:
    """A process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def is_rank(pid: int) -> bool:
    """Whether a process is a rank, and not one that launches ranks."""
    program, *arguments = command_of(pid) or [b""]
    return b"inflight.worker" in arguments and b"mpiexec" not in program


def _parent(pid: int) -> int:
    """0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _read_line(descriptor: int, timeout: float) -> str:
    """Up to the end of line or file; "" at the deadline."""
    collected = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not collected.endswith(b"\n"):
            if not selector.select(timeout):
                return ""
            part = os.read(descriptor, 65536)
            if not part:
                return ""
            collected += part
    return collected.decode()


def main(arguments: str) -> int:
    """The supervisor's process: serve with options from JSON, report the endpoints through a pipe."""
    options = json.loads(arguments)
    descriptor = options.pop("ready_descriptor")
    os.set_inheritable(descriptor, False)
    if "checkpoint" in options:
        options["checkpoint"] = find_name(options["checkpoint"]) or Path(options["checkpoint"])
    if "models" in options:
        options["models"] = of_arguments(options["models"], shares=options.pop("shares", {}))
    for name in ("model_repository", "tritonserver", "log_file", "api_key_file"):
        if options.get(name) is not None:
            options[name] = Path(options[name])
    if options.get("openai") is not None:
        options["openai"] = OpenAIOptions(**options["openai"])
    options |= {name: tuple(options.get(name, ())) for name in ("server_arguments", "apis")}

    def tell_endpoints(endpoints: Endpoints) -> None:
        values = {**dataclasses.asdict(endpoints), "run_directory": str(endpoints.run_directory)}
        os.write(descriptor, json.dumps(values).encode() + b"\n")

    assert threading.current_thread() is threading.main_thread()
    threading.Thread(target=_end_with, args=(os.pidfd_open(os.getppid()),), daemon=True).start()
    return serve(ServeOptions(**options, on_ready=tell_endpoints))


def _end_with(parent: int) -> None:
    """Stop serving when the tests' process is gone, however it went: a killed run must leave no server behind."""
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
