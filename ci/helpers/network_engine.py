"""One GptManager on a real network in this process, for tests that compare tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.scheduler import Scheduler
from inflight.batch_manager.sequence import SequenceStatus
from inflight.batch_manager.state_slots import StateSlots
from inflight.config import EngineConfig, SchedulerPolicy
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.errors import RequestError
from inflight.request import Request
from inflight.result import Result
from inflight.runtime.model_runner import ModelRunner

BLOCK_SIZE, MAX_SEQ_LEN = 4, 64


class Engine:
    """One GptManager over a real runner, with the results of every sequence."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: SchedulerPolicy,
        num_blocks: int,
        max_num_tokens: int,
        max_batch_size: int = 6,
        enable_reuse: bool = True,
        kv_cache: dict[str, Any] | None = None,
        rank_group: RankGroup | None = None,
        **options: Any,
    ) -> None:
        """`kv_cache`: further options of the KVCacheManager; `options`: of the EngineConfig. `rank_group`: of several
        ranks, all of which serve the same requests."""
        config = EngineConfig(
            gpt_model_path=str(folder),
            device="cpu",
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=MAX_SEQ_LEN,
            tokens_per_block=BLOCK_SIZE,
            max_tokens_in_paged_kv_cache=num_blocks * BLOCK_SIZE,
            **{"cpu_compile": "false", **options},
        )
        self.runner = ModelRunner.load(config, rank_group or SingleRank())
        self.kv_cache = KVCacheManager(
            num_blocks=self.runner.num_blocks,
            block_size=BLOCK_SIZE,
            windows=self.runner.windows,
            max_num_tokens=max_num_tokens,
            hash_key=b"key",
            enable_reuse=enable_reuse,
            num_host_blocks=self.runner.num_host_blocks,
            state_slots=StateSlots.beside_rows(
                max_batch_size, self.runner.num_snapshots, self.runner.num_host_snapshots
            ),
            state_interval=config.state_snapshot_interval,
            **(kv_cache or {}),
        )
        self.scheduler = Scheduler(
            kv_cache=self.kv_cache,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=MAX_SEQ_LEN,
            policy=policy,
            num_stages=config.pipeline_parallel_size,
        )
        self._manager = GptManager(
            runner=self.runner,
            scheduler=self.scheduler,
            callbacks=Callbacks(get_inference_requests=self._get, send_response=self._send),
            limits=self.runner.limits,
            speculative_decoding=config.speculative_decoding,
        )
        self._queue: list[Request] = []
        self.results: dict[tuple[int, int], list[Result]] = {}
        self.num_paused = 0
        self.paused: set[int] = set()
        """Ids of requests that were paused."""

    def serve(self, requests: list[Request]) -> None:
        self._queue = list(requests)
        while self._queue or self._manager.num_active_requests:
            self._manager.step()
            self.scheduler.check()
            if self.scheduler.num_paused:
                self.num_paused += self.scheduler.num_paused
                waiting = [s for s in self.scheduler._waiting if s.status is SequenceStatus.PAUSED]
                self.paused |= {sequence.request.request_id for sequence in waiting}

    def tokens(self, request_id: int, index: int = 0) -> list[int]:
        return [token for result in self.results[request_id, index] for token in result.output_token_ids]

    def log_probs(self, request_id: int, index: int = 0) -> list[float]:
        return [value for result in self.results[request_id, index] for value in result.log_probs]

    def _get(self, max_num_requests: int) -> list[Request]:
        taken, self._queue = self._queue[:max_num_requests], self._queue[max_num_requests:]
        return taken

    def _send(self, request_id: int, result: Result | None, is_final: bool, error: RequestError | None) -> None:
        assert error is None and result is not None
        self.results.setdefault((request_id, result.sequence_index), []).append(result)
