"""The steps that a runner takes before it is ready, so that no request waits for a kernel to be compiled.

Which compiled kernel a launch needs depends on the number of rows or tokens, which decides the launch configuration,
and on the features of the sampler. On a GPU the steps therefore bring every padded number of rows, prompts of every
power of two, and every combination of the sampler's features; between two powers of two no launcher decides otherwise.
Logits post-processors are functions of others and are not called: the first row that names one waits for the sampler's
kernels for float32. A CPU compiles nothing at this time, and takes a few steps that allocate what is allocated at first
use.

Rows share one block, so that the steps fit into any cache: what they compute means nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from inflight.log_progress import LogProgress
from inflight.prompt_tuning import EmbeddingTable
from inflight.request_limits import RequestLimits
from inflight.runtime.step_sizes import StepSizes
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import DRAFTED, LOG_PROBS, NO_SLOT, NewSequence, RowWork, SchedulerOutput

logger = logging.getLogger(__name__)

FILTERS: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "top_p": 0.9, "min_p": 0.1}
CHOICES: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, FILTERS)
"""Greedy, random, random with filters: with one of them or all makes no difference."""


def warm_up(steps: list[SchedulerOutput], run: Callable[[SchedulerOutput], None]) -> None:
    """Run the steps one after the other."""
    progress = LogProgress(logger, "steps of the warm-up, which compiles kernels, are done", len(steps))
    for number, step in enumerate(steps, 1):
        run(step)
        progress.note(number)


def warmup_steps(
    sizes: StepSizes,
    limits: RequestLimits,
    *,
    num_rows: int,
    block_size: int,
    max_num_tokens: int,
    num_groups: int = 1,
) -> list[SchedulerOutput]:
    """`num_rows`: of the largest batch; `max_num_tokens`: of one step; `num_groups`: of layers with own blocks."""
    longest = min(max_num_tokens, limits.max_input_len)
    made = _Steps(limits, num_rows, block_size, num_groups)
    if limits.pooled:
        return [*made.prefills(longest if sizes.pads else min(block_size, longest), max_num_tokens, NO_SLOT)]
    steps = [*made.first(min(block_size, longest))]
    if sizes.pads:
        for slot in [NO_SLOT, 0][: 1 + (limits.num_adapter_slots > 0)]:
            steps += (made.decodes(size, slot) for size in reversed(sizes.num_rows))
            steps += made.prefills(longest, max_num_tokens, slot)
        if limits.embedding_size:
            steps.append(made.embedded(min(block_size, longest)))
        steps += made.samplings()
        if limits.has_draft_model:
            steps += (made.drafts(size) for size in sizes.num_rows if 2 * size <= num_rows)
    return steps


class _Steps:
    def __init__(self, limits: RequestLimits, num_rows: int, block_size: int, num_groups: int) -> None:
        self._limits = limits
        self._num_rows = num_rows
        self._block_size = block_size
        self._num_groups = num_groups

    def first(self, num_tokens: int) -> Iterator[SchedulerOutput]:
        """A prefill, a draft and a decode, greedy and random; a block is copied to itself, which changes nothing."""
        for sampling in ({}, FILTERS):
            new = self._new(0, num_tokens, SamplingConfig(**sampling), outputs=(LOG_PROBS,))
            yield SchedulerOutput(new_sequences=[new], rows=[_prefill(new)], block_copies=[(0, 0)])
            room = self._limits.max_seq_len - num_tokens
            if room > 1 and self._limits.has_draft_model and self._num_rows > 1:
                yield SchedulerOutput(new_sequences=[], rows=[_draft(0, num_tokens)])
            if room:
                yield SchedulerOutput(new_sequences=[], rows=[_decode(0, num_tokens)])

    def decodes(self, num_rows: int, slot: int) -> SchedulerOutput:
        news = [self._new(row, 1, adapter_slot=slot) for row in range(num_rows)]
        return SchedulerOutput(new_sequences=news, rows=[_decode(new.row, 0) for new in news])

    def prefills(self, longest: int, max_num_tokens: int, slot: int) -> Iterator[SchedulerOutput]:
        """Prompts of each power of two and of `longest`: one, and as many as a step has room for.

        triton compiles a kernel anew for numbers that are not multiples of 16: so prompts come also with a token more,
        and the longest with one less. Its linear layers multiply up to 64 tokens, and in deterministic mode and with
        quantised weights any number.
        """
        powers = [1 << power for power in range(1, longest.bit_length())]
        lengths = {*powers, *(power + 1 for power in powers), longest - 1, longest}
        for length in sorted(length for length in lengths if 1 < length <= longest):
            for count in sorted({1, min(max_num_tokens // length, self._num_rows)}):
                news = [self._new(row, length, adapter_slot=slot) for row in range(count)]
                works = [_prefill(new, num_sampled=int(not self._limits.pooled)) for new in news]
                yield SchedulerOutput(new_sequences=news, rows=works)

    def embedded(self, num_tokens: int) -> SchedulerOutput:
        """A prompt that brings the embeddings of its tokens."""
        table = EmbeddingTable.of(np.zeros((1, self._limits.embedding_size), dtype=np.float16))
        new = self._new(0, num_tokens, token_id=self._limits.vocab_size, embedding_table=table)
        return SchedulerOutput(new_sequences=[new], rows=[_prefill(new)])

    def samplings(self) -> Iterator[SchedulerOutput]:
        """A row with each combination of penalties, a bias, forbidden tokens, filters and log probabilities."""
        features = product(({}, {"repetition_penalty": 1.1}), ({}, {"logit_bias": {0: 1.0}}), (0, 2), CHOICES, (0, 1))
        for penalty, bias, min_tokens, choice, tells in features:
            new = self._new(
                0,
                1,
                SamplingConfig(**penalty, **bias, **choice, min_tokens=min_tokens),
                end_ids=[0],
                outputs=(LOG_PROBS,) if tells else (),
            )
            yield SchedulerOutput(new_sequences=[new], rows=[_decode(0, 0)])

    def drafts(self, num_rows: int) -> SchedulerOutput:
        """Each row with one draft of the draft model."""
        news = [self._new(row, 2) for row in range(num_rows)]
        return SchedulerOutput(new_sequences=news, rows=[_draft(new.row, 1) for new in news])

    def _new(
        self, row: int, num_tokens: int, sampling: SamplingConfig | None = None, *, token_id: int = 0, **others: Any
    ) -> NewSequence:
        return NewSequence(
            row=row,
            token_ids=[token_id] * num_tokens,
            num_prompt_tokens=num_tokens,
            block_ids=[0] * self._num_groups * (num_tokens // self._block_size + 1),
            sampling_config=sampling or SamplingConfig(),
            **others,
        )


def _prefill(new: NewSequence, num_sampled: int = 1) -> RowWork:
    num_tokens = new.num_prompt_tokens
    return RowWork(row=new.row, start=0, num_tokens=num_tokens, token_ids=new.token_ids, num_sampled=num_sampled)


def _decode(row: int, start: int) -> RowWork:
    """Of a token that the host knows, as all pipeline stages must."""
    return RowWork(row=row, start=start, num_tokens=1, token_ids=[0], is_chosen=True)


def _draft(row: int, start: int) -> RowWork:
    return RowWork(row=row, start=start, num_tokens=2, token_ids=[DRAFTED], num_sampled=2)
