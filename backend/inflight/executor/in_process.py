"""One rank on a thread of this process: for programs that use the engine as a library, for tests and benchmarks.

It uses the same RequestBook and the same worker loop as ranks in processes of their own, but no sockets.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.executor.executor import resolve_config
from inflight.executor.front.engine_state import EngineState
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.executor.front.journal_entry import RANKS_LOST
from inflight.executor.rank.assembly import (
    LoadedRunner,
    LoadRunner,
    load_model_runner,
    make_manager,
    make_token_budget,
    make_transfer,
)
from inflight.executor.rank.block_transfer.block_transfer import BlockTransfer
from inflight.executor.rank.callbacks import RankCallbacks
from inflight.executor.rank.leader.contexts import Contexts
from inflight.executor.rank.leader.request_book import RequestBook
from inflight.executor.wire.block_messages import NO_BLOCK_ORDERS
from inflight.executor.wire.messages import NO_INPUT, CancelSequence, RankInput
from inflight.generation_defaults import GenerationDefaults
from inflight.kv_cache_events import KVCacheEvent
from inflight.logits_post_processor import LogitsPostProcessorConfig
from inflight.lora import NO_ORDERS
from inflight.request import Request
from inflight.result import Response
from inflight.stats import IterationStats, RequestStatsPerIteration

logger = logging.getLogger(__name__)

PREPARATION_POLL_SECONDS = 0.001
"""How often grammars and adapters are looked after that requests wait for while nothing else happens."""
FRONT = b""
"""Name of the only front, for the RequestBook."""


class InProcessExecutor(Front):
    """If the worker loop fails, the executor stays down: the device of this process may be unusable after that.
    There are no ranks that could die without this process, so nothing is ever replayed."""

    def __init__(
        self,
        config: EngineConfig,
        load_runner: LoadRunner = load_model_runner,
        *,
        logits_post_processors: LogitsPostProcessorConfig | None = None,
    ) -> None:
        """The checkpoint may be named as a model on the hub. `logits_post_processors`: functions of this program, in
        place of those that `config` names; they are called on the engine's threads. Raises ConfigurationError for more
        than one rank, and for a wrong generation_config.json."""
        config = resolve_config(None, config)
        super().__init__(config, GenerationDefaults.load(config))
        if config.num_ranks != 1:
            raise ConfigurationError(
                "tensor_parallel_size, pipeline_parallel_size and data_parallel_size must be 1 for an engine inside "
                "this process"
            )
        if config.spare_ranks:
            raise ConfigurationError(
                "spare_ranks must be 0 for an engine inside this process: its rank cannot be replaced"
            )
        self._config = config
        self._load_runner = load_runner
        if logits_post_processors is not None:
            assert load_runner is load_model_runner, "another runner does not take them"
            self._load_runner = partial(load_model_runner, post_processors=logits_post_processors)
        self._leader = _InProcessLeader(self, stats_seconds=config.stats_check_period_ms / 2000)
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.wait()
        if isinstance(self._start_error, ConfigurationError):
            raise self._start_error
        if self._start_error is not None:
            raise ConfigurationError(f"the engine could not be loaded: {self._start_error}") from self._start_error

    def shutdown(self) -> None:
        self._replica_lost(EngineState.CLOSED, SHUT_DOWN)
        self._leader.shut_down()
        if self._thread.ident is not None:
            self._thread.join()
        self._replica_lost(EngineState.CLOSED, SHUT_DOWN)

    def is_participant(self) -> bool:
        return True

    # -- Front -------------------------------------------------------------------------------------------------

    def _encode(self, request: Request) -> object:
        return request

    def _send_request(self, replica: int, request_id: int, encoded: object) -> None:
        assert isinstance(encoded, Request)
        self._leader.send(encoded)

    def _send_cancel(self, replica: int, request_id: int) -> None:
        self._leader.send(request_id)

    def _send_cancel_sequence(self, replica: int, request_id: int, sequence_index: int) -> None:
        self._leader.send(CancelSequence(request_id, sequence_index))

    def _drop_unsent(self, replica: int) -> None:
        """The leader's thread reads the inbox until it ends."""

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            runner = self._load_runner(self._config, SingleRank())
            try:
                self._serve(runner)
            finally:
                self._replica_lost(EngineState.DOWN, RANKS_LOST)
                runner.close()
        except Exception as error:
            if self._started.is_set():
                logger.exception("the engine's loop failed")
            self._start_error = error
            self._started.set()

    def _serve(self, runner: LoadedRunner) -> None:
        config = self._config.for_device(runner.description.device)
        with tempfile.TemporaryDirectory(prefix="engine-") as folder:
            transfer, contexts = make_transfer(config, runner, Path(folder), SingleRank())
            try:
                self._run_loop(config, runner, transfer, contexts)
            finally:
                for each in (transfer, contexts):
                    if each is not None:
                        each.close()

    def _run_loop(
        self, config: EngineConfig, runner: LoadedRunner, transfer: BlockTransfer | None, contexts: Contexts | None
    ) -> None:
        book = RequestBook(
            config.max_in_flight,
            grammars=runner.grammars,
            adapters=runner.adapter_library,
            contexts=contexts,
            preemption_rows=config.preemption_rows,
        )
        self._leader.use(book)
        rank = RankCallbacks(SingleRank(), self._leader, runner.adapters, transfer, make_token_budget(config))
        manager = make_manager(config, runner, rank.callbacks, raise_on_step_failure=False, notes_events=True)
        rank.attach(manager)
        self._replica_ready(runner.limits, runner.description, max_in_flight=config.max_in_flight)
        self._started.set()
        manager.run()
        self._leader.deliver_responses()


class _InProcessLeader:
    """Implements rank.callbacks.Leader. Other threads `send` to it."""

    def __init__(self, front: InProcessExecutor, *, stats_seconds: float) -> None:
        """`stats_seconds`: shortest time between two reports of a busy engine's newest statistics."""
        self._inbox: deque[Request | int | CancelSequence] = deque()
        self._news = threading.Event()
        self._book = RequestBook()
        self._front = front
        self.wants_iteration_stats = front._statistics.wants_iterations
        self.wants_request_stats = front._statistics.wants_requests
        self.wants_kv_cache_events = True
        self._stats_seconds = stats_seconds
        self._next_stats = 0.0
        self._shutdown = False

    def use(self, book: RequestBook) -> None:
        """Before the first request: an empty book, as the configuration and the loaded engine make it."""
        self._book = book

    def send(self, item: Request | int | CancelSequence) -> None:
        """From any thread: a request, the id of one to cancel, or one of its sequences."""
        self._inbox.append(item)
        self._news.set()

    def shut_down(self) -> None:
        self._shutdown = True
        self._news.set()

    def next_input(self, max_requests: int, may_block: bool) -> RankInput:
        self.deliver_responses()
        self._read_inbox()
        while may_block and not self._book.has_input and not self._shutdown:
            self.deliver_responses()  # of requests that were refused
            self._news.wait(PREPARATION_POLL_SECONDS if self._book.is_preparing else None)
            self._read_inbox()
            self._book.poll_preparations()
        if self._shutdown:
            self._book.stop_everything()
        requests, stops = self._book.take(0) if self._shutdown else self._book.take(max_requests, is_idle=may_block)
        sequences, adapters = self._book.take_cancelled_sequences(), self._book.take_adapter_orders()
        blocks = self._book.take_block_orders()
        self.deliver_responses()
        now_ms = self._book.time_to_tell()
        has_orders = adapters is not NO_ORDERS or blocks is not NO_BLOCK_ORDERS
        if not (requests or stops or sequences or has_orders or now_ms or self._shutdown):
            return NO_INPUT
        return RankInput(
            requests=requests,
            stops=stops,
            cancelled_sequences=sequences,
            adapters=adapters,
            blocks=blocks,
            shutdown=self._shutdown,
            now_ms=now_ms,
        )

    def respond(self, response: Response) -> None:
        self._book.respond(response)

    def wants_stats(self) -> bool:
        return time.monotonic() >= self._next_stats

    def report_stats(self, json: str) -> None:
        self._next_stats = time.monotonic() + self._stats_seconds
        self._front._report_stats(json, self._book.num_queued)

    def report_iteration(self, stats: IterationStats | None, requests: RequestStatsPerIteration | None) -> None:
        self._front._report_iterations(
            [] if stats is None else [self._book.complete(stats)], [] if requests is None else [requests]
        )

    def report_kv_cache_events(self, events: list[KVCacheEvent]) -> None:
        self._front._report_kv_cache_events(events)

    def all_ranks_answered(self) -> None:
        return None

    def deliver_responses(self) -> None:
        for started in self._book.take_started().values():
            self._front._note_started(started)
        for responses in self._book.collect_responses().values():
            self._front._deliver(responses)

    def _read_inbox(self) -> None:
        self._news.clear()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._book.submit(FRONT, item)
            elif isinstance(item, CancelSequence):
                self._book.cancel_sequence(FRONT, item.request_id, item.sequence_index)
            else:
                self._book.cancel(FRONT, [item])
