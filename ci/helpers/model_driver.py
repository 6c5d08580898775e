"""Drives a ModelRunner with hand-made steps: starts sequences on demand, chunks prompts, shares blocks, pauses rows.

Blocks are allocated in a scrambled order, so that a block table that is read wrongly is noticed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from inflight.prompt_tuning import EmbeddingTable
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.step_handle import StepHandle
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import (
    LOG_PROBS,
    NO_SLOT,
    NewSequence,
    RowTensors,
    RowWork,
    SchedulerOutput,
    StepOutput,
)

GREEDY = SamplingConfig()


def launch(runner: ModelRunner, scheduled: SchedulerOutput) -> StepHandle:
    """Start both halves of a step, one after the other."""
    handle = runner.forward(scheduled)
    runner.sample(handle)
    return handle


@dataclass(kw_only=True)
class Work:
    """One sequence and how it is to be computed."""

    prompt: list[int]
    max_tokens: int = 16
    arrives: int = 0
    """Step before which it is not started."""
    chunk: int = 10**9
    """Most tokens of its prompt in one step."""
    sampling: SamplingConfig = GREEDY
    end_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    log_probs: bool = False
    outputs: tuple[str, ...] = ()
    """Names of tensors that it asks for."""
    num_log_probs: int = 0
    embedding_table: EmbeddingTable | None = None
    """Of the ids of its prompt beyond the vocabulary."""
    adapter: tuple[int, int] | None = None
    """The slot, which its first step fills, and the uid of its adapter."""
    pauses_at: int = 0
    """Number of output tokens after which its blocks are taken away and it starts again; 0 = never."""
    shares: Work | None = None
    """Another sequence, whose first `shared_blocks` blocks hold the beginning of this one's prompt."""
    shared_blocks: int = 0

    output: list[int] = field(default_factory=list)
    output_log_probs: list[float] = field(default_factory=list)
    tensors: list[RowTensors] = field(default_factory=list)
    """As they came, step by step."""
    error: str = ""
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_known: int = 0
    """Tokens of the prompt, and after a pause of the output before it, that are to be prefilled."""
    num_pending: int = 0
    state_slot: int = 0
    """Where the state behind the blocks is that others share; 0 = nobody does."""
    state_border: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return bool(self.error) or len(self.output) >= self.max_tokens


class Driver:
    def __init__(self, runner: ModelRunner, max_outstanding: int = 2, seed: int = 0) -> None:
        self.runner = runner
        self.num_steps = 0
        self._max_outstanding = max_outstanding
        self._num_groups = len(runner.windows)
        self._free_blocks = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free_blocks)
        self._free_rows = [6, 1, 4, 0, 5, 3, 2, 7]
        self._outstanding: deque[tuple[Any, list[Work], dict[int, Work]]] = deque()

    def run(self, works: list[Work]) -> list[list[int]]:
        """Compute all of `works` together; their outputs."""
        self._keep_states(works)
        waiting = list(works)
        running: list[Work] = []
        step = 0
        while waiting or running or self._outstanding:
            self._pause(running, waiting)
            new = [work for work in waiting if work.arrives <= step]
            for work in new:
                waiting.remove(work)
                running.append(work)
            self._step(new, running)
            running = [work for work in running if not work.is_done]
            step += 1
        return [work.output for work in works]

    def _keep_states(self, works: list[Work]) -> None:
        """Where layers keep states of sequences, each that others share keeps one more."""
        shared = {id(work.shares): work for work in works if work.shares is not None}
        for number, work in enumerate(shared.values() if self.runner.num_snapshots is not None else ()):
            assert work.shares is not None
            work.shares.state_slot = len(self._free_rows) + 1 + number
            work.shares.state_border = work.shared_blocks * self.runner.block_size

    def release(self, work: Work) -> None:
        """Free the row and blocks of `work`."""
        self._free_blocks += work.blocks[work.shared_blocks * self._num_groups :]
        work.blocks = []

    def _pause(self, running: list[Work], waiting: list[Work]) -> None:
        if any(work.pauses_at and len(work.output) + work.num_pending >= work.pauses_at for work in running):
            self._collect_all()
            for work in [work for work in running if work.pauses_at and not work.is_done]:
                work.pauses_at = 0
                self.release(work)
                self._free_rows.insert(0, work.row)
                work.row, work.num_computed, work.shares, work.shared_blocks = -1, 0, None, 0
                running.remove(work)
                waiting.insert(0, work)

    def _step(self, new: list[Work], running: list[Work]) -> None:
        new_sequences = [self._start(work) for work in new]
        rows: list[RowWork] = []
        sampling: list[Work] = []
        for work in running:
            if len(work.output) + work.num_pending >= work.max_tokens or work.is_done:
                continue
            rows.append(self._decode(work) if work.num_computed >= work.num_known else self._prefill(work))
            if rows[-1].num_sampled:
                sampling.append(work)
        copies = [(work.shares.state_slot, work.row) for work in new if work.shares and work.shares.state_slot]
        loads = [work.adapter for work in new if work.adapter is not None]
        scheduled = SchedulerOutput(new_sequences=new_sequences, rows=rows, adapter_loads=loads, state_copies=copies)
        if rows:
            self.num_steps += 1
            by_row = {work.row: work for work in running}
            self._outstanding.append((launch(self.runner, scheduled), sampling, by_row))
        if len(self._outstanding) >= self._max_outstanding or not rows:
            self._collect()

    def _start(self, work: Work) -> NewSequence:
        work.row = self._free_rows.pop()
        if work.shares is not None:
            work.blocks = work.shares.blocks[: work.shared_blocks * self._num_groups]
            work.num_computed = work.shared_blocks * self.runner.block_size
        work.num_known = len(work.token_ids)
        return NewSequence(
            row=work.row,
            token_ids=work.token_ids,
            num_prompt_tokens=len(work.prompt),
            block_ids=list(work.blocks),
            sampling_config=work.sampling,
            end_ids=work.end_ids,
            bad_words=work.bad_words,
            outputs=((LOG_PROBS,) if work.log_probs else ()) + work.outputs,
            num_log_probs=work.num_log_probs,
            embedding_table=work.embedding_table,
            adapter_slot=NO_SLOT if work.adapter is None else work.adapter[0],
        )

    def _blocks_for(self, work: Work, num_tokens: int) -> list[int]:
        needed = -(-num_tokens // self.runner.block_size) * self._num_groups - len(work.blocks)
        taken = [self._free_blocks.pop() for _ in range(needed)]
        work.blocks += taken
        return taken

    def _decode(self, work: Work) -> RowWork:
        start = work.num_computed
        blocks = self._blocks_for(work, start + 1)
        work.num_computed += 1
        work.num_pending += 1
        return RowWork(row=work.row, start=start, num_tokens=1, new_block_ids=blocks)

    def _prefill(self, work: Work) -> RowWork:
        start = work.num_computed
        end = min(start + work.chunk, work.num_known)
        work.num_computed = end
        samples = end == work.num_known
        work.num_pending += samples
        is_kept = work.state_slot and start < work.state_border <= end
        return RowWork(
            row=work.row,
            start=start,
            num_tokens=end - start,
            kept_states=[(work.state_border - start - 1, work.state_slot)] if is_kept else [],
            token_ids=work.token_ids[start:end],
            new_block_ids=self._blocks_for(work, end),
            num_sampled=int(samples),
        )

    def _collect_all(self) -> None:
        while self._outstanding:
            self._collect()

    def _collect(self) -> None:
        if not self._outstanding:
            return
        handle, works, by_row = self._outstanding.popleft()
        output: StepOutput = self.runner.collect(handle)
        assert len(output.token_ids) == len(works)
        for row, tensors in output.tensors.items():
            assert by_row[row].outputs
            by_row[row].tensors.append(tensors)
        for index, work in enumerate(works):
            work.num_pending -= 1
            if work.row in output.errors:
                work.error = output.errors[work.row]
                assert output.token_ids[index] == []
            else:
                work.output += output.token_ids[index]
                if output.log_probs is not None:
                    work.output_log_probs += output.log_probs[index]
            if work.is_done and not work.num_pending:
                self._free_rows.insert(0, work.row)
