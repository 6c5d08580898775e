"""Runs steps on one device: the real Runner. Launch lays a step out and starts it; collect waits and brings tokens.

On a CPU the steps run one after the other on a thread of their own; on a GPU on a stream of their own. Either way the
token that a row samples stays on the device and feeds the row's next step. Knows rows and blocks, no requests.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import AttentionMetadata
from inflight.models.network import Network
from inflight.request import RequestLimits, SamplingConfig
from inflight.runtime.device import keep_freed_memory, pinned_memory, resident_memory
from inflight.runtime.kv_cache import KVCache
from inflight.runtime.loading import load_engine
from inflight.runtime.row_state import RowState
from inflight.runtime.row_table import RowTable
from inflight.runtime.sampler import SampledTokens, Sampler
from inflight.runtime.step_input import StepInput, prepare_step
from inflight.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput, StepOutput

Runs = TypeVar("Runs", bound="ModelRunner")

NOT_FINITE = "the model's logits are not finite: its weights or its numeric range do not fit this prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHandle:
    """A launched step."""

    rows: list[int]
    """That sample, in batch order."""
    sampled: Future[SampledTokens | None]
    """On the host; on a GPU valid only after `done`."""
    done: torch.cuda.Event | None


class ModelRunner:
    """Built by `load`. `limits`, `num_blocks`, `block_size` and `device_type` are what others must know of it."""

    def __init__(
        self,
        *,
        decoder: Network,
        kv_cache: KVCache,
        block_size: int,
        limits: RequestLimits,
        max_batch_size: int,
        max_num_tokens: int,
        group: TensorParallelGroup,
        device: torch.device,
        thread: ThreadPoolExecutor,
    ) -> None:
        """`thread`: the one that the network was loaded on.

        On a CPU all computing stays there. OpenMP gives every thread that computes a team of its own, and teams that
        together outnumber the cores sleep at each barrier instead of spinning: a step of 135 M bfloat16 parameters on
        2 cores then takes 38 ms instead of 17.
        """
        self.limits = limits
        self.device_type = device.type
        self.num_blocks = kv_cache.num_blocks
        self.block_size = block_size
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._max_num_tokens = max_num_tokens
        self._group = group
        self._device = device
        max_blocks = -(-(limits.max_seq_len + 1) // block_size)
        self._table = RowTable(max_batch_size, max_blocks, kv_cache.filler_block)
        self._state = RowState(self._table, limits.max_seq_len, limits.vocab_size, device)
        self._sampler = Sampler(max_batch_size, device)
        self._scrubbed: list[int] = []
        if device.type == "cuda":
            # Weights and caches were filled on another stream.
            torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = thread

    @classmethod
    def load(cls: type[Runs], config: EngineConfig, rank_group: RankGroup) -> Runs:
        """Read this rank's part of the checkpoint and take memory for the KV cache. Collective.

        Raises ConfigurationError for a checkpoint or a configuration that does not fit.
        """
        keep_freed_memory()
        thread = ThreadPoolExecutor(1, "inflight-step")
        try:
            engine = thread.submit(load_engine, config, rank_group).result()
        except BaseException:
            thread.shutdown()
            raise
        runner = cls(
            decoder=engine.decoder,
            kv_cache=engine.kv_cache,
            block_size=config.tokens_per_block,
            limits=engine.limits,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            group=engine.group,
            device=engine.device,
            thread=thread,
        )
        runner.warmup()
        return runner

    def warmup(self) -> None:
        """Run a prompt and a decode, greedy and random, so that what is made at first use is made before a request."""
        num_tokens = min(self.block_size, self._max_num_tokens, self.limits.max_input_len)
        token_ids = [0] * num_tokens
        num_blocks = min(-(-(num_tokens + 1) // self.block_size), self.num_blocks)
        random = SamplingConfig(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1)
        for sampling in (SamplingConfig(), random):
            new = NewSequence(
                row=0,
                token_ids=token_ids,
                num_prompt_tokens=num_tokens,
                block_ids=list(range(num_blocks)),
                sampling_config=sampling,
                return_log_probs=True,
            )
            prefill = ScheduledSequence(row=0, start=0, num_tokens=num_tokens, token_ids=token_ids)
            decode = ScheduledSequence(row=0, start=num_tokens, num_tokens=1)
            self.collect(self.launch(SchedulerOutput(new_sequences=[new], decodes=[], prefills=[prefill])))
            if num_blocks * self.block_size > num_tokens:
                self.collect(self.launch(SchedulerOutput(new_sequences=[], decodes=[decode], prefills=[])))

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Start a step; see Runner. The host's part is done when this returns, the device's part goes on."""
        rows = scheduled.sampling_rows
        scrubbed, self._scrubbed = self._scrubbed, []
        if self._stream is None:
            step = self._prepare(scheduled, scrubbed)
            return StepHandle(rows=rows, sampled=self._thread.submit(self._run, step), done=None)
        with torch.cuda.stream(self._stream):
            sampled: Future[SampledTokens | None] = Future()
            sampled.set_result(_to_pinned(self._run(self._prepare(scheduled, scrubbed))))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return StepHandle(rows=rows, sampled=sampled, done=done)

    def collect(self, handle: StepHandle) -> StepOutput:
        """Wait for a step; see Runner."""
        sampled = handle.sampled.result()
        if handle.done is not None:
            handle.done.synchronize()
        if sampled is None:
            return StepOutput(token_ids=[])
        finite: list[bool] = sampled.is_finite_S.tolist()
        token_ids: list[list[int]] = [[token] for token in sampled.token_ids_S.tolist()]
        log_probs = None
        if sampled.log_probs_S is not None:
            log_probs = [[value] for value in sampled.log_probs_S.tolist()]
        errors: dict[int, str] = {}
        if not all(finite):
            for index, row in enumerate(handle.rows):
                if not finite[index]:
                    errors[row] = NOT_FINITE
                    token_ids[index] = []
                    if log_probs is not None:
                        log_probs[index] = []
                    self._scrubbed += self._table.block_ids(row)
        return StepOutput(token_ids=token_ids, log_probs=log_probs, errors=errors)

    def memory_usage(self) -> tuple[int, int, int]:
        """Bytes in use: (host, device, pinned)."""
        device_bytes = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        return resident_memory(), device_bytes, pinned_memory(self._device)

    def close(self) -> None:
        """Finish what was launched and leave the group."""
        self._thread.shutdown(wait=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._group.close()

    # -- a step, host half ---------------------------------------------------------------------------------------------

    def _prepare(self, scheduled: SchedulerOutput, scrubbed: list[int]) -> StepInput:
        vocab_size = self.limits.vocab_size
        return prepare_step(scheduled, self._table, self.block_size, vocab_size, self._device, scrubbed)

    # -- a step, device half -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, step: StepInput) -> SampledTokens | None:
        self._kv_cache.scrub(step.scrubbed_block_ids)
        self._state.begin(step)
        if not len(step.token_ids_T):
            return None
        hidden_TD = self._decoder.forward(step.token_ids_T, self._kv_cache.layers, self._metadata(step))
        if step.sampling is None:
            return None
        if step.sampling_tokens_S is not None:
            hidden_TD = hidden_TD.index_select(0, step.sampling_tokens_S)
        sampled = self._sampler(self._decoder.logits(hidden_TD), step.sampling, self._state)
        self._state.end(step, sampled.token_ids_S)
        return sampled

    def _metadata(self, step: StepInput) -> AttentionMetadata:
        decodes, table = step.num_decodes, self._state.block_table
        return AttentionMetadata(
            positions_T=step.positions_T,
            slot_mapping_T=step.slot_mapping_T,
            num_decodes=decodes,
            decode_block_table=table[:, : step.decode_blocks].index_select(0, step.rows[:decodes]),
            decode_seq_lens_N=step.seq_lens[:decodes],
            num_prefills=step.num_prefills,
            prefill_block_table=table[:, : step.prefill_blocks].index_select(0, step.rows[decodes:]),
            prefill_seq_lens_P=step.seq_lens[decodes:],
            prefill_start_loc=step.prefill_start_loc,
            max_prefill_len=step.max_prefill_len,
        )


def _to_pinned(sampled: SampledTokens | None) -> SampledTokens | None:
    """Copies on their way to pinned host memory, without waiting."""
    if sampled is None:
        return None

    def copy(values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    log_probs_S = None if sampled.log_probs_S is None else copy(sampled.log_probs_S)
    return SampledTokens(
        token_ids_S=copy(sampled.token_ids_S), log_probs_S=log_probs_S, is_finite_S=copy(sampled.is_finite_S)
    )
