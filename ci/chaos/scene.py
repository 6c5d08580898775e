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
from inflight.supervisor import processes

SERVING_DEADLINE = 180.0
"""Seconds within which a server must serve again, on a machine with other work."""
LAUNCHER = "the launcher"
TRITONSERVER = "tritonserver"
OPENAI = "the OpenAI server"
LEADER, FOLLOWER = "rank 0", "rank 1"


def stub_of(model: str) -> str:
    return f"the stub of {model}"


class ChaosFailed(Exception):
    """Something that was promised did not come true; the message says what."""


class Scene:
    """`server`: running. `can_compute_again`: whether a token that is computed again has the very same bits."""

    def __init__(self, server: ServerProcess, sandbox: Sandbox, *, num_ranks: int) -> None:
        self.server, self.sandbox, self.num_ranks = server, sandbox, num_ranks
        self.endpoints = server.ready_endpoints

    def roles(self) -> dict[str, int]:
        """What each of the server's lasting processes is -> its pid."""
        found: dict[str, int] = {}
        for pid in self.server.pids:
            command = command_of(pid)
            if b"inflight.openai" in command:
                found[OPENAI] = pid
            elif b"inflight.worker" in command:
                name = LAUNCHER if b"mpiexec" in command[0] else f"rank {_rank(pid)}"
                found[name] = pid
            elif _program(pid) == TRITONSERVER:
                found[TRITONSERVER] = pid
                stubs = processes.stubs(pid).items()
                found |= {stub_of(instance.rsplit("_", 2)[0]): stub for stub, instance in stubs if instance}
        return found

    def helpers_of(self, pid: int) -> list[int]:
        """Processes that the process started, such as those of a rank's grammars."""
        return [each for each in self.server.pids if _parent(each) == pid]

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
                    if not await client.is_model_ready(model, client_timeout=5.0):
                        return f"{model} is not ready"
            timeout = aiohttp.ClientTimeout(total=5.0)
            health = f"http://{self.endpoints.openai}/health"
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(health) as response:
                if response.status != 200:
                    return "the OpenAI server is not healthy"
            is_ready = (await self.metrics()).of("inflight_engine_ready") >= 1
            return "" if is_ready else "the metrics say that the engine is not ready"
        except (OSError, InferenceServerException, grpc.RpcError, TimeoutError, aiohttp.ClientError) as error:
            return f"{type(error).__name__}: {error}"

    async def wait_until_serving(self) -> None:
        """Until no process, no model and no answer is missing. Raises ChaosFailed."""
        last = ""

        async def serves() -> bool:
            nonlocal last
            if (trouble := await self.trouble()) != last:
                last = trouble
                print(f"          {trouble[:200] or 'serves'}", flush=True)
            return not last

        await self.wait_until(serves, "the server serves")

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
def running_server(num_ranks: int, sandbox: Sandbox, parameters: dict[str, str]) -> Iterator[Scene]:
    """With a model of each API and an OpenAI server beside it. One rank computes in bfloat16 where C++ can; several in
    float32."""
    from request_kinds import ENGINE

    own = {
        "tensor_parallel_size": str(num_ranks),
        "dtype": "bfloat16" if num_ranks == 1 else "float32",
        "num_threads": "1",
        "max_batch_size": "16",
        "max_tokens_in_paged_kv_cache": "16384",
        **{key: str(value) for key, value in ENGINE.items()},
    }
    options = {"apis": list(APIS), "openai": {"port": 0}, "canary_period": 30.0}
    helpers = str(Path(__file__).parents[1] / "helpers")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [helpers, os.environ.get("PYTHONPATH")]))
    with ServerProcess(parameters={**own, **parameters}, **options) as server:
        yield Scene(server, sandbox, num_ranks=num_ranks)


def _rank(pid: int) -> int:
    """As its launcher told it; 0 without one."""
    with contextlib.suppress(OSError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = item.partition(b"=")
            if name in (b"PMI_RANK", b"PMIX_RANK", b"OMPI_COMM_WORLD_RANK"):
                return int(value)
    return 0


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0
