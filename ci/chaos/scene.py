"""The server under test: its processes by what they are, and whether it serves. Knows neither load nor faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import tritonclient.grpc.aio as grpcaio
from server_metrics import Metrics
from server_process import ServerProcess, command_of
from tritonclient.utils import InferenceServerException

from ci.chaos.sandbox import Sandbox
from ci.chaos.workload import APIS, MODELS
from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.launch import LAUNCH, RANK
from inflight.supervisor import processes
from inflight_kernels.cpu import unsupported_reason

SERVING_DEADLINE = 300.0
"""Seconds within which a server must serve again, on a machine with other work."""
LAUNCHER = "the launcher"
TRITONSERVER = "tritonserver"
OPENAI = "the OpenAI server"
LEADER, FOLLOWER = "rank 0", "rank 1"
RANK_VARIABLES = (RANK.encode(), b"PMI_RANK", b"PMIX_RANK", b"OMPI_COMM_WORLD_RANK")


def stub_of(model: str) -> str:
    return f"the stub of {model}"


class ChaosFailed(Exception):
    """Something that was promised did not come true; the message says what."""


class Scene:
    """`server`: running, with so many ranks and sets of spare ranks. `is_exact`: a token that is computed again has the
    very same bits."""

    def __init__(
        self, server: ServerProcess, sandbox: Sandbox, *, num_ranks: int, num_spares: int, is_exact: bool
    ) -> None:
        self.server, self.sandbox, self.is_exact = server, sandbox, is_exact
        self.num_ranks, self.num_spares = num_ranks, num_spares
        self.endpoints = server.ready_endpoints
        self._address = EngineAddress.of("llm", self.endpoints.run_directory)

    def roles(self) -> dict[str, int]:
        """What each of the server's lasting processes is -> its pid."""
        found: dict[str, int] = {}
        for pid in self.server.pids:
            command = command_of(pid)
            if b"inflight.http" in command:
                found[OPENAI] = pid
            elif b"inflight.worker" in command:
                if self._serves_now(pid):
                    found[_part_of_launch(pid, command)] = pid
            elif _program(pid) == TRITONSERVER:
                found[TRITONSERVER] = pid
                stubs = processes.stubs(pid).items()
                found |= {stub_of(instance.rsplit("_", 2)[0]): stub for stub, instance in stubs if instance}
        return found

    def waiting_ranks(self) -> dict[int, str]:
        """pid -> its part, of all launches but the one that serves: those that load, and spares."""
        workers = {pid: command_of(pid) for pid in self.server.pids}
        return {
            pid: _part_of_launch(pid, command)
            for pid, command in workers.items()
            if b"inflight.worker" in command and not self._serves_now(pid)
        }

    def _serves_now(self, pid: int) -> bool:
        """Whether a worker belongs to the launch that fronts find at the engine's address."""
        socket = self._address.resolve()
        return socket is not None and str(socket.parent).encode() in _environment(pid).get(LAUNCH.encode(), b"")

    def expected_roles(self) -> set[str]:
        """Of a server that serves."""
        ranks = {f"rank {rank}" for rank in range(self.num_ranks)}
        launchers = {LAUNCHER} if self.num_ranks > 1 else set()
        return {TRITONSERVER, OPENAI, *map(stub_of, MODELS), *ranks, *launchers}

    async def trouble(self) -> str:
        """What a server lacks that serves: a process, a model that is ready, an answer; "" = nothing."""
        if absent := self.expected_roles() - set(self.roles()):
            return f"{', '.join(sorted(absent))} is not there"
        try:
            async with grpcaio.InferenceServerClient(self.endpoints.grpc) as client:
                for model in MODELS:
                    if not await client.is_model_ready(model, client_timeout=30.0):
                        return f"{model} is not ready"
            timeout = aiohttp.ClientTimeout(total=30.0)
            health = f"http://{self.endpoints.openai}/health"
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(health) as response:
                if response.status != 200:
                    return "the OpenAI server is not healthy"
            metrics = await self.metrics()
            if metrics.of("inflight_engine_ready") < 1:
                return "the metrics say that the engine is not ready"
            return "" if metrics.of("inflight_engine_spares") >= self.num_spares else "a spare is not loaded"
        except (OSError, InferenceServerException, grpc.RpcError, TimeoutError, aiohttp.ClientError) as error:
            return f"{type(error).__name__}: {error}"

    async def wait_until_serving(self) -> None:
        """Until nothing is missing. Raises ChaosFailed."""
        trouble = ""

        async def serves() -> bool:
            nonlocal trouble
            trouble = await self.trouble()
            return not trouble

        try:
            await self.wait_until(serves, "the server serves")
        except ChaosFailed as error:
            raise ChaosFailed(f"{error} ({trouble})") from None

    async def metrics(self) -> Metrics:
        return await asyncio.to_thread(Metrics, self.server)

    async def wait_until(self, holds: Callable[[], Any], what: str, deadline: float = SERVING_DEADLINE) -> None:
        """`holds`: a condition, or a coroutine that returns one. Raises ChaosFailed."""
        limit = time.monotonic() + deadline
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            if time.monotonic() > limit:
                raise ChaosFailed(f"not within {deadline:.0f} s: {what}")
            if self.server.process is not None and self.server.process.poll() is not None:
                raise ChaosFailed(f"the supervisor has ended with {self.server.process.returncode}: {self.server.told}")
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def running_server(
    num_ranks: int, num_spares: int, sandbox: Sandbox, parameters: dict[str, str], checkpoint: Path | None
) -> Iterator[Scene]:
    """With a model of each API and an OpenAI server beside it. Ranks compute in bfloat16 where C++ can, else in
    float32. `checkpoint`: None = the default model."""
    from request_kinds import ENGINE

    own = {
        "tensor_parallel_size": str(num_ranks),
        "dtype": "float32" if unsupported_reason() else "bfloat16",
        "spare_ranks": str(num_spares),
        "num_threads": "1",
        "max_batch_size": "16",
        "max_tokens_in_paged_kv_cache": "16384",
        **{key: str(value) for key, value in ENGINE.items()},
        **parameters,
    }
    num_stages = int(own.get("pipeline_parallel_size", "1"))
    is_exact = own["dtype"] == "bfloat16" and not unsupported_reason()
    options: dict[str, Any] = {"apis": list(APIS), "openai": {"port": 0}, "canary_period": 30.0, "adopt_timeout": 180.0}
    if checkpoint is not None:
        options["checkpoint"] = checkpoint
    helpers = str(Path(__file__).parents[1] / "helpers")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [helpers, os.environ.get("PYTHONPATH")]))
    with ServerProcess(parameters=own, **options) as server:
        yield Scene(server, sandbox, num_ranks=num_ranks * num_stages, num_spares=num_spares, is_exact=is_exact)


def _part_of_launch(pid: int, command: list[bytes]) -> str:
    """The launcher, or a rank by its number as it was told; 0 without one."""
    if b"mpiexec" in command[0]:
        return LAUNCHER
    environment = _environment(pid)
    numbers = [environment[name] for name in RANK_VARIABLES if environment.get(name)]
    return f"rank {int(numbers[0]) if numbers else 0}"


def _environment(pid: int) -> dict[bytes, bytes]:
    """Of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return {name: value for name, _, value in (item.partition(b"=") for item in items)}
    return {}


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    return ""
