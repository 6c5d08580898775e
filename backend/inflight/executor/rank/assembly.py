"""Builds the parts of one rank: the runner, its scheduler and its GptManager. Does not know how messages travel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.event_buffer import EventBuffer
from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.scheduler import Scheduler
from inflight.batch_manager.state_slots import StateSlots
from inflight.batch_manager.token_budget import TokenBudget
from inflight.block_groups import BlockGroups
from inflight.checkpoint_digest import checkpoint_digest
from inflight.config import EngineConfig
from inflight.distributed.rank_group import RankGroup
from inflight.engine_description import EngineDescription
from inflight.executor.rank.block_transfer.block_transfer import BlockTransfer
from inflight.executor.rank.callbacks import FollowsOrders
from inflight.executor.rank.leader.contexts import Contexts
from inflight.executor.wire.context_state import layout_digest, read_secret
from inflight.executor.wire.launch import Launch
from inflight.garbage_pause import no_collections
from inflight.logits_post_processor import LogitsPostProcessorConfig
from inflight.request_limits import RequestLimits
from inflight.runtime.adapters.adapter_library import AdapterLibrary
from inflight.runtime.guided.grammars import Grammars
from inflight.runtime.runner import Runner

if TYPE_CHECKING:
    from inflight.runtime.prompt_blocks import PromptBlocks


class LoadedRunner(Runner, Protocol):
    """A runner whose weights are loaded and whose KV cache is allocated."""

    limits: RequestLimits
    description: EngineDescription
    num_blocks: int
    windows: tuple[int, ...]
    """Of the groups of layers that have blocks of their own, see BlockGroups."""
    num_host_blocks: int
    """Slots in host memory for cold blocks."""
    num_snapshots: int | None
    """Slots for states of sequences besides those of rows; None = no layer keeps such a state."""
    num_host_snapshots: int
    """Slots in host memory for cold ones of them."""
    block_size: int
    grammars: Grammars | None
    """On the leader, if requests may ask for guided decoding."""
    adapter_library: AdapterLibrary | None
    """On the leader, if requests may use low-rank adapters."""

    prompt_blocks: PromptBlocks | None
    """On every rank, if contexts are handed over."""

    def occupy_memory(self) -> None:
        """Begin to take the memory that ranks without work do without. Raises ConfigurationError if there is none."""

    @property
    def adapters(self) -> FollowsOrders | None:
        """What this rank stores of them."""


def make_transfer(
    config: EngineConfig, runner: LoadedRunner, folder: Path, rank_group: RankGroup
) -> tuple[BlockTransfer | None, Contexts | None]:
    """This rank's part in handing contexts over, and on the leader that of the engine; None if none are. `folder`: the
    launch's own. Raises ConfigurationError."""
    blocks = runner.prompt_blocks
    if blocks is None:
        return None, None
    secret = read_secret(config.kv_transfer_key_file)
    contexts = None
    if rank_group.rank == 0:
        layout = layout_digest(
            checkpoint_digest((config.gpt_model_path, config.speculative_model_dir), runner.description),
            runner.description.layers,
            runner.block_size,
            runner.windows,
            blocks.unit_bytes,
            blocks.scales,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
        )
        contexts = Contexts(
            folder,
            secret=secret,
            layout=layout,
            groups=BlockGroups(runner.block_size, runner.windows),
            num_ranks=rank_group.size,
            max_tokens=config.max_tokens_in_buffer,
        )
    transfer = BlockTransfer(config, blocks, folder, secret, rank=rank_group.rank, num_ranks=rank_group.size)
    return transfer, contexts


LoadRunner = Callable[[EngineConfig, RankGroup], LoadedRunner]
"""Collective: called once on every rank. Raises ConfigurationError."""


def load_model_runner(
    config: EngineConfig,
    rank_group: RankGroup,
    post_processors: LogitsPostProcessorConfig | None = None,
    *,
    launch: Launch | None = None,
) -> LoadedRunner:
    """Load the ModelRunner. `post_processors`: in place of those that `config` names. `launch`: of a front that starts
    ranks again when they die; those of a relaunch take the memory of their KV cache beside the first steps.

    Its import, here and not above, takes seconds, which the launch and the join need not wait for.
    """
    with no_collections():
        from inflight.runtime.model_runner import ModelRunner

    weights_place = None
    if launch is not None and launch.weights:
        weights_place = launch.weights[rank_group.rank] if launch.on_fronts_host else ""
    return ModelRunner.load(
        config,
        rank_group,
        post_processors,
        weights_place=weights_place,
        defers_cache=config.spare_ranks > 0 or (launch is not None and launch.is_relaunch),
    )


def make_token_budget(config: EngineConfig) -> TokenBudget | None:
    """The leader's; None = there is no target."""
    target_ms = config.inter_token_latency_target_ms
    return TokenBudget(target_ms * 1_000_000, config.max_num_tokens) if target_ms else None


def make_manager(
    config: EngineConfig,
    runner: LoadedRunner,
    callbacks: Callbacks,
    *,
    raise_on_step_failure: bool,
    notes_events: bool = False,
) -> GptManager:
    """A GptManager over `runner`. Ranks differ only in the secret key with which each hashes its cached prefixes, and
    in who notes what happens to these: the leader (`notes_events`), if the configuration asks for it."""
    # Tokens of an encoder see those behind them, too.
    is_causal = not runner.limits.pooled or runner.limits.is_causal
    kv_cache = KVCacheManager(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        windows=runner.windows,
        max_num_tokens=config.max_num_tokens,
        enable_reuse=config.enable_kv_cache_reuse and is_causal,
        enable_partial_reuse=config.enable_partial_reuse,
        copy_on_partial_reuse=config.copy_on_partial_reuse,
        num_host_blocks=runner.num_host_blocks,
        min_offload_priority=config.secondary_offload_min_priority,
        events=EventBuffer(config.event_buffer_max_size) if notes_events and config.event_buffer_max_size else None,
        hash_key=os.urandom(32),
        state_slots=StateSlots.beside_rows(config.max_batch_size, runner.num_snapshots, runner.num_host_snapshots),
        state_interval=-(-config.state_snapshot_interval // runner.block_size) * runner.block_size,
    )
    scheduler = Scheduler(
        kv_cache=kv_cache,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=runner.limits.max_seq_len,
        policy=config.batch_scheduler_policy,
        enable_chunked_context=config.enable_chunked_context and is_causal,
        num_adapter_slots=runner.limits.num_adapter_slots,
        priority_preemption=config.priority_preemption,
        num_stages=config.pipeline_parallel_size,
    )
    return GptManager(
        runner=runner,
        scheduler=scheduler,
        callbacks=callbacks,
        limits=runner.limits,
        speculative_decoding=config.speculative_decoding,
        raise_on_step_failure=raise_on_step_failure,
    )
