"""Runs steps on one device: the real Runner. `forward` prepares a step and starts its network; `sample` starts the
sampling of its tokens; `collect` waits for them and copies them to the host.

On a CPU the steps run one after the other on a thread of their own; on a GPU on a stream of their own. Either way the
token that a row samples stays on the device and feeds the row's next step. Knows rows and blocks, no requests.

Of pipeline stages each prepares every step and runs its own layers. The last one samples, and publishes the results, so
that `collect` returns the same in all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from msgspec import structs

from inflight.config import EngineConfig
from inflight.distributed.mapping import Mapping
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.engine_description import EngineDescription
from inflight.errors import InsufficientMemory
from inflight.logits_post_processor import LogitsPostProcessorConfig
from inflight.models.decoder import Decoder
from inflight.models.network import Network
from inflight.output_config import Pooling
from inflight.request_limits import RequestLimits
from inflight.runtime.adapters.adapter_library import AdapterLibrary
from inflight.runtime.adapters.adapter_store import AdapterStore
from inflight.runtime.adapters.rank_adapters import open_adapters
from inflight.runtime.decode_graphs import GRAPHS
from inflight.runtime.device import (
    choose_device,
    is_usable_after,
    keep_freed_memory,
    pinned_memory,
    resident_memory,
)
from inflight.runtime.draft_model import keeps_states
from inflight.runtime.drafts import fill_in
from inflight.runtime.guided.grammars import Grammars
from inflight.runtime.guided.guidance import Guidance
from inflight.runtime.guided.libraries import make_library
from inflight.runtime.host_units import HostUnits
from inflight.runtime.loading import ITS_OWN, LoadedEngine, RankResources, load_engine
from inflight.runtime.logits_post_processing import LogitsPostProcessing
from inflight.runtime.memory_profile import step_bytes
from inflight.runtime.prompt_blocks import PromptBlocks
from inflight.runtime.row_table import RowTable
from inflight.runtime.state_store import StateStore
from inflight.runtime.step_computation import StepComputation
from inflight.runtime.step_findings import StepFindings
from inflight.runtime.step_handle import StepHandle
from inflight.runtime.step_input import StepPreparation
from inflight.runtime.step_message import encode_result, received_result
from inflight.runtime.step_sizes import StepSizes
from inflight.runtime.step_tensors import by_row
from inflight.runtime.warmup import warm_up, warmup_steps
from inflight.scheduler_output import SchedulerOutput, StepOutput

logger = logging.getLogger(__name__)

Runs = TypeVar("Runs", bound="ModelRunner")

NOTHING_FORCED: dict[int, list[int]] = {}
"""Never written to."""


class ModelRunner:
    """Built by `load`. The scheduler and the executor read `limits`, `num_blocks`, `num_host_blocks`, `num_snapshots`,
    `num_host_snapshots`, `block_size` and `description`."""

    def __init__(
        self,
        *,
        decoder: Network,
        store: StateStore,
        block_size: int,
        limits: RequestLimits,
        max_batch_size: int,
        max_num_tokens: int,
        groups: ParallelGroups,
        device: torch.device,
        description: EngineDescription,
        thread: Executor,
        rank_group: RankGroup | None = None,
        grammars: Grammars | None = None,
        post_processors: LogitsPostProcessorConfig | None = None,
        num_snapshots: int | None = None,
        host_blocks: HostUnits | None = None,
        host_states: HostUnits | None = None,
        prompt_blocks: PromptBlocks | None = None,
        adapters: AdapterStore | None = None,
        adapter_library: AdapterLibrary | None = None,
        draft_network: Network | None = None,
        records_graphs: bool = False,
        busy_wait_events: bool = False,
        scores_of: Pooling | None = None,
    ) -> None:
        """`thread`: the one that the network was loaded on. `grammars`: on the leader; None = none can be followed.
        `rank_group`: None = a single rank. `post_processors`: what `limits` names; None = nothing. `num_snapshots`: see
        Units. `host_blocks`, `host_states`: where cold blocks and states of sequences go; None = nowhere.
        `prompt_blocks`: None = none are exchanged with other ranks. `adapters`: None = none is served;
        `adapter_library`: on the leader. `draft_network`: the draft model, whose states stand behind those of `decoder`
        in `store`; None = none. `busy_wait_events`: see EngineConfig. `records_graphs`: decode steps replay CUDA
        graphs, where the device has them. `scores_of`: see LoadedEngine.

        On a CPU only this thread computes. OpenMP creates a team of threads for every thread that computes, and if the
        teams together have more threads than there are cores, they sleep at each barrier instead of spinning: a step of
        135 M bfloat16 parameters on 2 cores then takes 38 ms instead of 17.
        """
        self.limits = limits
        self.description = description
        self.num_blocks = store.num_blocks
        self.windows = store.windows
        self.block_size = block_size
        self._store = store
        self.prompt_blocks = prompt_blocks
        self.num_snapshots = num_snapshots
        self.num_host_blocks = 0 if host_blocks is None else host_blocks.num_units
        self.num_host_snapshots = 0 if host_states is None else host_states.num_units
        self._max_num_tokens = max_num_tokens
        self._groups = groups
        self._device = device
        max_blocks = -(-(limits.max_seq_len + 1) // block_size)
        self._sizes = StepSizes.of(device.type, max_batch_size)
        self._table = RowTable(max_batch_size, max_blocks, store.filler_block, len(store.windows))
        self._preparation = StepPreparation(
            self._table,
            vocab_size=limits.vocab_size,
            sizes=self._sizes,
            model_outputs=limits.model_outputs,
            adapters=adapters,
            num_adapter_slots=limits.num_adapter_slots,
            has_draft_model=draft_network is not None,
            num_slots=None if num_snapshots is None else max_batch_size + 1 + num_snapshots,
            draft_keeps_states=draft_network is not None and keeps_states(draft_network),
            has_sequences=bool(limits.pooled) and not limits.is_causal,
            has_token_types=limits.has_token_types,
        )
        self._post_processing = LogitsPostProcessing(post_processors or LogitsPostProcessorConfig(), groups.tensor)
        self._computation = StepComputation(
            decoder=decoder,
            draft_network=draft_network,
            store=store,
            block_size=block_size,
            table=self._table,
            limits=limits,
            sizes=self._sizes,
            input_bytes=self._preparation.input_bytes(max_num_tokens),
            post_processing=self._post_processing,
            groups=groups,
            device=device,
            host_blocks=host_blocks,
            host_states=host_states,
            prompt_blocks=prompt_blocks,
            adapters=adapters,
            busy_wait_events=busy_wait_events,
            scores_of=scores_of,
        )
        self.grammars = grammars
        self.adapters = adapters
        self.adapter_library = adapter_library
        self._guidance = Guidance(rank_group or SingleRank(), grammars, limits.vocab_size)
        self._scrubbed: list[int] = []  # blocks that the next step scrubs
        if device.type == "cuda":
            # Weights and caches were filled on another stream.
            torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = thread
        self._is_staged = groups.pipeline.size > 1
        self._records_graphs = records_graphs
        self._publisher: ThreadPoolExecutor | None = None
        if self._is_staged and groups.samples:
            self._publisher = ThreadPoolExecutor(1, "inflight-results")

    @classmethod
    def load(
        cls: type[Runs],
        config: EngineConfig,
        rank_group: RankGroup,
        post_processors: LogitsPostProcessorConfig | None = None,
        *,
        weights_place: str | None = None,
        defers_cache: bool = False,
        resources: RankResources = ITS_OWN,
    ) -> Runs:
        """Read this rank's part of the checkpoint and allocate the KV cache. Collective.

        `post_processors`: logits post-processors in place of those that `config` names. `weights_place`,
        `defers_cache`, `resources`: see load_engine. Raises ConfigurationError for a checkpoint or a configuration that
        cannot be served.
        """
        device = resources.device or choose_device(config, rank_group.rank)
        config = config.for_device(device.type)
        if post_processors is None:
            is_caller = rank_group.rank == Mapping.of(config).first_rank_of_last_stage
            post_processors = LogitsPostProcessorConfig.load(config, is_caller=is_caller)
        keep_freed_memory()
        thread = resources.thread or ThreadPoolExecutor(1, "inflight-step")
        try:
            none = LogitsPostProcessorConfig()
            of_engine = partial(cls._of, config=config, thread=thread, rank_group=rank_group, post_processors=none)
            loading = thread.submit(
                load_engine,
                config,
                rank_group,
                partial(step_bytes, runner_of=of_engine),
                weights_place=weights_place,
                defers_cache=defers_cache,
                resources=resources,
            )
            engine = loading.result()
        except BaseException:
            thread.shutdown()
            raise
        adapters, library = open_adapters(config, engine.adapters, engine.device, is_leader=rank_group.rank == 0)
        runner = cls._of(
            engine,
            config=config,
            thread=thread,
            rank_group=rank_group,
            grammars=_grammars(config, engine.limits.vocab_size, engine.device.type) if rank_group.rank == 0 else None,
            post_processors=post_processors,
            adapters=adapters,
            adapter_library=library,
        )
        runner.warmup()
        return runner

    @classmethod
    def _of(
        cls: type[Runs],
        engine: LoadedEngine,
        *,
        config: EngineConfig,
        thread: Executor,
        rank_group: RankGroup,
        post_processors: LogitsPostProcessorConfig,
        **others: Any,
    ) -> Runs:
        """`others`: what does not come with a loaded engine."""
        return cls(
            decoder=engine.decoder,
            store=engine.store,
            num_snapshots=engine.num_snapshots,
            host_blocks=engine.host_blocks,
            host_states=engine.host_states,
            prompt_blocks=engine.prompt_blocks,
            block_size=config.tokens_per_block,
            limits=structs.replace(engine.limits, logits_post_processors=post_processors.names),
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            groups=engine.groups,
            device=engine.device,
            description=engine.description,
            thread=thread,
            rank_group=rank_group,
            post_processors=post_processors,
            draft_network=engine.draft_network,
            scores_of=engine.scores_of,
            # transformers' code may wait for the device, and stages wait for each other. Encoders decode nothing.
            records_graphs=config.cuda_graph_mode and isinstance(engine.decoder, Decoder) and not engine.limits.pooled,
            busy_wait_events=config.busy_wait_events,
            **others,
        )

    def warmup(self) -> None:
        """Run steps that need every kernel and buffer that a request may need; see `inflight.runtime.warmup`."""
        steps = warmup_steps(
            self._sizes,
            self.limits,
            num_rows=self._table.num_rows,
            block_size=self.block_size,
            max_num_tokens=self._max_num_tokens,
            num_groups=len(self.windows),
        )
        warm_up(steps, self._run_to_end)
        self.record_graphs()

    def record_graphs(self) -> None:
        """Record the graphs of decode steps, if device and configuration have them. Raises InsufficientMemory."""
        if not self._records_graphs or self._device.type not in GRAPHS:
            return
        self._enter()  # a graph is not recorded on a thread's default stream
        started = time.monotonic()
        make_graph = GRAPHS[self._device.type]()
        try:
            number = self._start(self._computation.record_graphs, make_graph).result()
        except torch.OutOfMemoryError as error:
            raise InsufficientMemory(
                "the CUDA graphs of decode steps do not fit beside the KV cache: lower kv_cache_free_gpu_mem_fraction "
                "or max_batch_size, or set cuda_graph_mode to false"
            ) from error
        if self._stream is not None:
            self._stream.synchronize()
        logger.info("%d graphs of decode steps are recorded after %.1f s", number, time.monotonic() - started)

    def _run_to_end(self, scheduled: SchedulerOutput) -> None:
        handle = self.forward(scheduled)
        self.sample(handle)
        self.collect(handle)

    def forward(self, scheduled: SchedulerOutput) -> StepHandle:
        """Start a step; see Runner. The host's part is done when this returns, while the device still computes."""
        if not self.num_host_blocks and (scheduled.offloads or scheduled.onboards):
            raise ValueError("blocks in host memory are not served, but the step copies some")
        if not self.num_host_snapshots and (scheduled.state_offloads or scheduled.state_onboards):
            raise ValueError("states in host memory are not served, but the step copies some")
        if self.prompt_blocks is None and (scheduled.arrivals or scheduled.exports):
            raise ValueError("blocks of prompts are not exchanged with other ranks, but the step copies some")
        self._enter()
        if self._is_staged and any(len(work.token_ids) < work.num_tokens for work in scheduled.rows):
            raise ValueError("only the last pipeline stage knows a token that the step does not tell")
        step = self._preparation.prepare(scheduled, self._scrubbed)
        self._scrubbed = []
        guided = self._guidance.begin(scheduled.new_sequences, step.sampling_rows, step.drafts)
        processed = self._post_processing.begin(scheduled.new_sequences, step.sampling_rows)
        forwarded = self._start(self._computation.forward, step, bool(guided or processed))
        return StepHandle(step=step, forwarded=forwarded, guided=guided, processed=processed, refused={})

    def sample(self, handle: StepHandle) -> dict[int, list[int]]:
        """Start a step's second half; see Runner."""
        assert handle.sampled is None and handle.forwarded is not None, "a step was sampled twice"
        self._enter()
        mask, forced = None, NOTHING_FORCED
        if handle.guided:
            found = self._guidance.find(handle.guided)
            mask, forced, handle.refused = found.mask, found.forced, found.refused
        if not self._groups.samples:
            handle.sampled = received_result(self._groups.pipeline.next_result())
            return forced
        forwarded, handle.forwarded = handle.forwarded, None
        handle.sampled = self._start(self._computation.sample, forwarded, mask, handle.processed)
        if self._publisher is not None:
            self._publisher.submit(self._publish, handle)
        return forced

    def _publish(self, handle: StepHandle) -> None:
        """Wait for a step's results, and tell the other stages. If the step failed, they learn that this rank ends."""
        self._enter()
        self._groups.pipeline.publish(encode_result(handle.wait()))

    def _start(self, half: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run one half of a step: on a CPU queued to the thread that computes, on a GPU launched on its stream now."""
        if self._stream is None:
            return self._thread.submit(half, *arguments)
        started: Future[Any] = Future()
        started.set_result(half(*arguments))
        return started

    def _enter(self) -> None:
        """Make the GPU and the stream of steps those of the calling thread, which must not touch the device before.

        A new thread has GPU 0 and its default stream. What it pinned or waited for would open a context on GPU 0, which
        takes some 500 MB there, and what it copied would not be in the order of the steps.
        """
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)

    def collect(self, handle: StepHandle) -> StepOutput:
        """Wait for a step; see Runner."""
        self._enter()
        result = handle.wait()
        sampled, tensors = result.sampled, by_row(handle.step.tensor_plan, result.tensors)
        if sampled is None:
            return StepOutput(token_ids=[], tensors=tensors)
        token_ids: list[int] = sampled.token_ids_S.tolist()
        if result.drafts is not None:
            fill_in(handle.step.drafts, result.drafts.tolist())
        self._guidance.advance(handle.guided, token_ids)
        self._post_processing.advance(handle.processed, token_ids)
        found = StepFindings.of(handle, sampled, token_ids, tensors)
        for row in found.broken_rows:
            self._scrubbed += self._table.block_ids(row)
        for sequence, rejected in found.rejected:
            self._preparation.note_rejected(sequence, rejected)
        return found.output

    def survives(self, error: Exception) -> bool:
        """Whether further steps can run after one raised; see Runner."""
        return is_usable_after(error, self._device)

    def memory_usage(self) -> tuple[int, int, int]:
        """Bytes in use: (host, device, pinned)."""
        device_bytes = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        return resident_memory(), device_bytes, pinned_memory(self._device)

    def occupy_memory(self) -> None:
        """Begin to take the memory of a deferred KV cache; see load_engine."""
        self._store.occupy()

    def close(self) -> None:
        """Wait for all launched steps, end what grammars and adapters have started, and leave the group."""
        self._enter()
        if self.grammars is not None:
            self.grammars.close()
        if self.adapter_library is not None:
            self.adapter_library.close()
        self._thread.shutdown(wait=True)
        if self._publisher is not None:
            self._publisher.shutdown(wait=True)
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        self._computation.drop_graphs()
        self._groups.close()


def _grammars(config: EngineConfig, vocab_size: int, device_type: str) -> Grammars:
    folder = config.tokenizer_dir or config.gpt_model_path
    library = make_library(config.guided_decoding_backend, device_type)
    return Grammars(folder, vocab_size, config.max_batch_size, library)
