"""The engines that are measured, behind one interface: each returns its tokens per second for the three cases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ci.bench.transformers_process import THREADS, TransformersProcess
from ci.bench.workload import CONCURRENCY, Job
from inflight.config import EngineConfig
from inflight.executor.front.front import Front
from inflight.executor.in_process import InProcessExecutor
from inflight.request import Request
from inflight_client import AsyncClient


class Engine(Protocol):
    def decode(self, job: Job) -> float:
        """Tokens per second after the first."""

    def batch(self, jobs: list[Job]) -> float:
        """Output tokens per second of all jobs, CONCURRENCY at a time."""

    def prefill(self, job: Job) -> float:
        """Prompt tokens per second until the first token."""


class Inflight:
    """The engine without a server: in this process, or, of a front that was started, where that has it."""

    def __init__(self, engine: EngineConfig | Front) -> None:
        if isinstance(engine, EngineConfig):
            self._executor: Front = InProcessExecutor(engine)
            self._executor.start()
        else:
            self._executor = engine

    def decode(self, job: Job) -> float:
        arrivals = [time.perf_counter() for _ in self._tokens(job)]
        return (job.max_tokens - 1) / (arrivals[-1] - arrivals[0])

    def batch(self, jobs: list[Job], num_streams: int = CONCURRENCY) -> float:
        start = time.perf_counter()
        num_tokens = sum(self.run(jobs, num_streams))
        assert num_tokens == sum(job.max_tokens for job in jobs)
        return num_tokens / (time.perf_counter() - start)

    def run(self, jobs: Iterable[Job], num_streams: int) -> Iterator[int]:
        """All jobs, `num_streams` at a time; yields how many tokens each response gave."""
        waiting = iter(jobs)
        num_running = sum(self._submit(next(waiting, None)) for _ in range(num_streams))
        while num_running:
            for response in self._executor.await_responses():
                assert response.result is not None, response.error_msg
                if response.is_final:
                    num_running += self._submit(next(waiting, None)) - 1
                yield len(response.result.output_token_ids)

    def prefill(self, job: Job) -> float:
        start = time.perf_counter()
        for _ in self._tokens(job):
            pass
        return len(job.prompt) / (time.perf_counter() - start)

    def close(self) -> None:
        self._executor.shutdown()

    def _submit(self, job: Job | None) -> int:
        """Returns how many requests that is."""
        if job is None:
            return 0
        request_id = self._executor.next_request_id()
        self._executor.enqueue_request(
            Request(request_id=request_id, input_token_ids=job.prompt, max_tokens=job.max_tokens, streaming=True)
        )
        return 1

    def _tokens(self, job: Job) -> Iterator[int]:
        self._submit(job)
        final = False
        while not final:
            for response in self._executor.await_responses():
                assert response.result is not None, response.error_msg
                yield from response.result.output_token_ids
                final = final or response.is_final


class Transformers:
    """transformers' generate in static batches, see transformers_peer."""

    def __init__(self, checkpoint: Path) -> None:
        self._process = TransformersProcess(checkpoint)

    def decode(self, job: Job) -> float:
        """Computed from the difference of two runs, so that the prefill is not counted."""
        first = self._process.seconds([job.prompt], 1)
        return (job.max_tokens - 1) / (self._process.seconds([job.prompt], job.max_tokens) - first)

    def batch(self, jobs: list[Job]) -> float:
        """A batch runs until its longest answer is done; only tokens that were asked for count."""
        seconds = 0.0
        for start in range(0, len(jobs), CONCURRENCY):
            part = jobs[start : start + CONCURRENCY]
            seconds += self._process.seconds([job.prompt for job in part], max(job.max_tokens for job in part))
        return sum(job.max_tokens for job in jobs) / seconds

    def prefill(self, job: Job) -> float:
        return len(job.prompt) / self._process.seconds([job.prompt], 1)

    def close(self) -> None:
        self._process.close()


class Served:
    """The engine behind tritonserver, asked over gRPC."""

    def __init__(self, grpc_url: str) -> None:
        self._url = grpc_url

    def batch(self, jobs: list[Job], num_streams: int = CONCURRENCY) -> float:
        return asyncio.run(self._batch(jobs, num_streams))

    async def _batch(self, jobs: list[Job], num_streams: int) -> float:
        slots = asyncio.Semaphore(num_streams)
        async with AsyncClient(self._url) as client:

            async def run(job: Job) -> int:
                async with slots, client.stream(job.prompt, max_tokens=job.max_tokens, end_id=-1) as stream:
                    return sum([len(chunk.token_ids or ()) async for chunk in stream])

            start = time.perf_counter()
            num_tokens = sum(await asyncio.gather(*map(run, jobs)))
            seconds = time.perf_counter() - start
        assert num_tokens == sum(job.max_tokens for job in jobs)
        return num_tokens / seconds


def engine_config(checkpoint: Path) -> EngineConfig:
    """The same for the engine in this process and behind the server."""
    return EngineConfig.from_parameters(engine_parameters(checkpoint))


def engine_parameters(
    checkpoint: Path, max_batch_size: int = CONCURRENCY, num_threads: int = THREADS
) -> dict[str, str]:
    return {
        "gpt_model_path": str(checkpoint),
        "dtype": "bfloat16",
        "device": "cpu",
        "num_threads": str(num_threads),
        "max_batch_size": str(max_batch_size),
        "max_num_tokens": "1024",
        "max_seq_len": "2048",
        "max_tokens_in_paged_kv_cache": str(1024 * max_batch_size),
        "enable_kv_cache_reuse": "false",
    }
