"""How much memory of a GPU steps take: measured before the KV cache gets the rest, by running the largest steps.

They run on a whole ModelRunner over a KV cache of one block, so everything counts that a runner allocates when it is
made (buffers, the state of rows), that its graphs keep, and that its steps allocate for a while (activations,
workspaces of libraries, logits of a full batch and what every sampling option makes of them). Kernels that are loaded
meanwhile, and what NCCL holds, are missing from the free memory already when it is asked for afterwards. What a runner
allocates later than in these steps must be added to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from msgspec import structs

from inflight.errors import InsufficientMemory
from inflight.request_limits import RequestLimits
from inflight.runtime.loading import EngineParts, LoadedEngine, with_cache
from inflight.runtime.runner import Runner
from inflight.runtime.state_store import Units
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import (
    BEAM_LOG_PROBS,
    CONTEXT,
    DRAFTED,
    GENERATION_LOGITS,
    HIDDEN_STATES,
    LOG_PROBS,
    NO_SLOT,
    TOP_LOG_PROBS,
    NewSequence,
    RowWork,
    SchedulerOutput,
)

BLOCK = 0
"""All rows share the cache's only block: what they compute means nothing."""
EVERY_OPTION = SamplingConfig(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    top_p_decay=0.9,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    no_repeat_ngram_size=2,
    logit_bias={0: 1.0},
)
BAD_WORDS = [[0], [0, 1]]
OUTPUTS = (LOG_PROBS, TOP_LOG_PROBS, BEAM_LOG_PROBS, GENERATION_LOGITS)
"""Those that are made of copies of the logits. Such copies stay on the device until the next step samples."""


class RecordingRunner(Runner, Protocol):
    def record_graphs(self) -> None:
        """Record the graphs that steps replay, if there are some."""


def step_bytes(parts: EngineParts, runner_of: Callable[[LoadedEngine], RecordingRunner]) -> int:
    """Most bytes of a GPU that are taken at a time for a runner, its graphs and its largest steps, beyond the
    weights. What the runner, which `runner_of` makes, leaves behind is given back. Collective. Raises
    InsufficientMemory."""
    device = parts.device
    torch.cuda.synchronize(device)
    before = int(torch.cuda.memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    # The runner makes its own stream that of this thread: only meanwhile.
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            graph_bytes, outside_bytes = _run(parts, runner_of)
        except torch.OutOfMemoryError as error:
            config = parts.config
            raise InsufficientMemory(
                f"a step of max_num_tokens {config.max_num_tokens} and max_batch_size {config.max_batch_size} does not "
                "fit beside the weights into the memory of the GPU: lower them, raise tensor_parallel_size, or free "
                "memory"
            ) from error
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before + graph_bytes
    gc.collect()
    torch.cuda.empty_cache()
    # The driver keeps memory for each graph, too. It was given back just now, and the runner's graphs take it again.
    return peak + max(outside_bytes - _outside_bytes(device), 0)


def _run(parts: EngineParts, runner_of: Callable[[LoadedEngine], RecordingRunner]) -> tuple[int, int]:
    """Returns the bytes that graphs keep in their pool, where no step allocates, and `_outside_bytes` while they are
    there."""
    config, engine = parts.config, with_cache(parts, Units(1, 0 if parts.state_shape.slot_bytes else None))
    runner = runner_of(engine)
    unused_before = _unused_bytes(parts.device)
    runner.record_graphs()
    graph_bytes = max(_unused_bytes(parts.device) - unused_before, 0)
    is_staged = parts.groups.pipeline.size > 1
    sizes, num_groups = (config.tokens_per_block, config.max_num_tokens), len(engine.store.windows)
    for step in largest_steps(engine.limits, *sizes, is_staged=is_staged, num_groups=num_groups):
        handle = runner.forward(step)
        runner.sample(handle)
        runner.collect(handle)
    return graph_bytes, _outside_bytes(parts.device)


def _unused_bytes(device: torch.device) -> int:
    """Bytes that torch has taken from the device, that no tensor uses, and that it cannot give back."""
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device)) - int(torch.cuda.memory_allocated(device))


def _outside_bytes(device: torch.device) -> int:
    """Bytes of the device that are in use, but not through torch: by the driver, by libraries, by other processes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes) - int(free_bytes) - int(torch.cuda.memory_reserved(device))


def largest_steps(
    limits: RequestLimits, block_size: int, max_num_tokens: int, *, is_staged: bool, num_groups: int = 1
) -> Iterator[SchedulerOutput]:
    """A full batch with every sampling option: its prompts, which together have as many tokens as a step may have, once
    more beside what the step before keeps for the host, then a token of each row and, with a draft model, drafts for as
    many rows as may have some. `is_staged`: the host must know all tokens. `num_groups`: of layers with
    blocks of their own."""
    num_rows = limits.max_batch_size
    share = -(-max_num_tokens // num_rows)
    num_tokens = max(min(share, limits.max_input_len, limits.max_seq_len - 3), 1)
    blocks = [BLOCK] * (num_groups * -(-min(num_tokens + 3, limits.max_seq_len) // block_size))
    token_ids = [0] * num_tokens
    new = [
        NewSequence(
            row=row,
            token_ids=token_ids,
            num_prompt_tokens=num_tokens,
            block_ids=blocks,
            sampling_config=EVERY_OPTION,
            bad_words=BAD_WORDS,
            outputs=OUTPUTS,
            num_log_probs=1,
            adapter_slot=0 if limits.num_adapter_slots else NO_SLOT,
        )
        for row in range(num_rows)
    ]
    prompts = [RowWork(row=row, start=0, num_tokens=num_tokens, token_ids=token_ids) for row in range(num_rows)]
    if limits.pooled:
        new = [
            structs.replace(each, outputs=(f"{CONTEXT}{HIDDEN_STATES}",), bad_words=[], num_log_probs=0) for each in new
        ]
        prompts = [structs.replace(work, num_sampled=0) for work in prompts]
    for _ in range(2):
        yield SchedulerOutput(new_sequences=new, rows=prompts)
    if limits.pooled:
        return
    known = [0] if is_staged else []
    if num_tokens < limits.max_seq_len:
        decodes = [
            RowWork(row=row, start=num_tokens, num_tokens=1, token_ids=known, is_chosen=is_staged)
            for row in range(num_rows)
        ]
        yield SchedulerOutput(new_sequences=[], rows=decodes)
    if limits.has_draft_model and num_rows > 1 and num_tokens + 3 <= limits.max_seq_len:
        drafted = [
            RowWork(row=row, start=num_tokens + 1, num_tokens=2, token_ids=[DRAFTED], num_sampled=2)
            for row in range(num_rows // 2)
        ]
        yield SchedulerOutput(new_sequences=[], rows=drafted)
