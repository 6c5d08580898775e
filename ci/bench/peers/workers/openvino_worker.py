"""OpenVINO GenAI's continuous batching as a worker: MODEL FORMAT."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import openvino
import openvino_genai
from protocol import CONCURRENCY, MAX_TOKENS, THREADS, Job, Run, serve

HINTS = {"f32": "f32", "bf16": "bf16", "f16": "f16", "int8": "f32"}
"""What activations are computed in, by format."""
CACHE_BLOCKS = 1024
"""Of 32 tokens each: room for all requests at a time."""


class Engine:
    def __init__(self, model: str, form: str) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.num_kv_blocks = CACHE_BLOCKS
        scheduling.max_num_seqs = CONCURRENCY
        scheduling.max_num_batched_tokens = MAX_TOKENS
        properties = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": HINTS[form]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduling, "CPU", properties)
        self._next_id = 0

    def run(self, jobs: list[Job]) -> Iterator[int]:
        """All requests are its own queue's: it runs as many at a time as its scheduler is told."""
        handles = [self._submit(job) for job in jobs]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            yield sum(self._read(handle) for handle in handles)

    def _submit(self, job: Job) -> openvino_genai.py_openvino_genai.GenerationHandle:
        options = openvino_genai.GenerationConfig(max_new_tokens=job.max_tokens, ignore_eos=True, do_sample=False)
        self._next_id += 1
        return self._pipeline.add_request(self._next_id, openvino.Tensor(np.array([job.prompt], np.int64)), options)

    @staticmethod
    def _read(handle: openvino_genai.py_openvino_genai.GenerationHandle) -> int:
        return sum(len(output.generated_ids) for output in handle.read().values()) if handle.can_read() else 0


def load() -> Run:
    return Engine(*sys.argv[1:]).run


if __name__ == "__main__":
    serve(load)
