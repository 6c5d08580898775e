"""llama.cpp as a worker: a loop over its sequences, as its server has one. MODEL FORMAT, which the file decides."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import llama_cpp
import numpy as np
from protocol import CONCURRENCY, THREADS, Job, Run, serve

CONTEXT = 1280
"""Cells of each sequence: enough for a prompt of 1,024, and for the longest of the others."""
BATCH = 2048


@dataclass
class Slot:
    """A sequence that is generated."""

    last_token: int
    position: int
    num_left: int


class Engine:
    def __init__(self, model: str) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = CONTEXT * CONCURRENCY
        options.n_seq_max = CONCURRENCY
        options.n_batch = BATCH
        options.n_threads = options.n_threads_batch = THREADS
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(self, jobs: list[Job]) -> Iterator[int]:
        waiting = list(reversed(jobs))
        running: dict[int, Slot] = {}
        while waiting or running:
            self._batch.n_tokens = 0
            rows: dict[int, int] = {}  # each sequence's last row of the batch
            for number, slot in running.items():
                rows[number] = self._add(number, slot.last_token, slot.position, True)
            for number in range(CONCURRENCY):
                if number in running or not waiting or self._batch.n_tokens + len(waiting[-1].prompt) > BATCH:
                    continue
                job = waiting.pop()
                llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)
                running[number] = Slot(0, len(job.prompt) - 1, job.max_tokens)
                for position, token in enumerate(job.prompt):
                    rows[number] = self._add(number, token, position, position + 1 == len(job.prompt))
            status = llama_cpp.llama_decode(self._context, self._batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            for number, row in rows.items():
                slot = running[number]
                slot.last_token, slot.position, slot.num_left = self._best(row), slot.position + 1, slot.num_left - 1
                if not slot.num_left:
                    del running[number]
            yield len(rows)

    def _add(self, sequence: int, token: int, position: int, is_output: bool) -> int:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, is_output
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.n_tokens += 1
        return row

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(
            np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)).argmax()
        )


def load() -> Run:
    return Engine(sys.argv[1]).run


if __name__ == "__main__":
    serve(load)
