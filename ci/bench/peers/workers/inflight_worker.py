"""This engine, without a server, as a worker: CHECKPOINT FORMAT, where a format is a `dtype`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from protocol import CONCURRENCY, MAX_TOKENS, THREADS, Job, Run, serve

from ci.bench.engines import engine_parameters
from inflight.config import EngineConfig
from inflight.executor.in_process import InProcessExecutor
from inflight.request import Request


class Engine:
    def __init__(self, checkpoint: str, dtype: str) -> None:
        own = {"dtype": dtype, "cpu_compile": os.environ.get("BENCH_CPU_COMPILE", "true")}
        parameters = engine_parameters(Path(checkpoint), CONCURRENCY, THREADS)
        assert parameters["max_seq_len"] == str(MAX_TOKENS)
        self._executor = InProcessExecutor(EngineConfig.from_parameters(parameters | own))
        self._executor.start()

    def run(self, jobs: list[Job]) -> Iterator[int]:
        waiting = iter(jobs)
        num_running = sum(self._submit(next(waiting, None)) for _ in range(CONCURRENCY))
        while num_running:
            for response in self._executor.await_responses():
                assert response.result is not None, response.error_msg
                if response.is_final:
                    num_running += self._submit(next(waiting, None)) - 1
                yield len(response.result.output_token_ids)

    def _submit(self, job: Job | None) -> int:
        """Returns how many requests that is."""
        if job is None:
            return 0
        request_id = self._executor.next_request_id()
        self._executor.enqueue_request(
            Request(request_id=request_id, input_token_ids=job.prompt, max_tokens=job.max_tokens, streaming=True)
        )
        return 1


def load() -> Run:
    return Engine(*sys.argv[1:]).run


if __name__ == "__main__":
    serve(load)
