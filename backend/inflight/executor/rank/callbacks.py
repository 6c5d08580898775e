"""GptManager's four callbacks, on every rank.

All input of a rank arrives here, in one broadcast per iteration: at its end, when the number of requests that can be
taken is known exactly. The manager receives the broadcast's stop signals at its next poll. While no request is active,
the leader waits for its fronts and the other ranks wait for the broadcast; at least every two seconds (a tick) all
ranks meet in a barrier.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import structs

from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager.token_budget import TokenBudget
from inflight.batch_manager_stats import BatchManagerStats
from inflight.distributed.rank_group import RankGroup
from inflight.errors import RequestError
from inflight.executor.wire.block_messages import BlockOrders
from inflight.executor.wire.messages import NO_INPUT, RankInput, decode_rank_input, encode_rank_input
from inflight.kv_cache_events import KVCacheEvent
from inflight.lora import AdapterOrders
from inflight.request import Request
from inflight.result import FinishReason, Response, Result
from inflight.stats import IterationStats, RequestStatsPerIteration


class Leader(Protocol):
    """The connection to the fronts, which only the leader rank has. Called on the worker loop's thread."""

    def next_input(self, max_requests: int, may_block: bool) -> RankInput:
        """Send the responses kept so far, then return the ranks' next input, with at most `max_requests` new requests.

        If it `may_block`, it waits for input until the next tick."""

    def respond(self, response: Response) -> None:
        """Keep a response, to be sent by the next call of next_input."""

    def wants_stats(self) -> bool:
        """Whether statistics are due to be reported now."""

    def report_stats(self, json: str) -> None:
        """Keep the newest statistics, to be sent to the fronts."""

    @property
    def wants_iteration_stats(self) -> bool:
        """Whether a front keeps the statistics of every iteration."""

    @property
    def wants_request_stats(self) -> bool:
        """Whether a front keeps the statistics of every request in every iteration."""

    def report_iteration(self, stats: IterationStats | None, requests: RequestStatsPerIteration | None) -> None:
        """Keep the statistics of the iteration that ends, those that are wanted, to be sent to such fronts."""

    @property
    def wants_kv_cache_events(self) -> bool:
        """Whether a front keeps what happens to the cached blocks. Until one does, the rank that notes it keeps it."""

    def report_kv_cache_events(self, events: list[KVCacheEvent]) -> None:
        """Keep these, to be sent to such fronts."""

    def all_ranks_answered(self) -> None:
        """All ranks have passed a tick's barrier, so all are alive."""


class FollowsOrders(Protocol):
    """A store of adapters."""

    def follow(self, orders: AdapterOrders) -> None:
        """Change what is stored."""


class FollowsBlockOrders(Protocol):
    """What fetches blocks from other engines."""

    def follow(self, orders: BlockOrders) -> None:
        """Begin to fetch, or drop, without waiting."""

    def forget(self, request_id: int) -> None:
        """The request is over."""


class RankCallbacks:
    """The callbacks of one rank; `leader` is None on all ranks but the first."""

    def __init__(
        self,
        rank_group: RankGroup,
        leader: Leader | None,
        adapters: FollowsOrders | None = None,
        blocks: FollowsBlockOrders | None = None,
        token_budget: TokenBudget | None = None,
    ) -> None:
        """`adapters`: what this rank stores of them; None = none is served. `blocks`: None = none are fetched.
        `token_budget`: of the leader; None = steps have as many tokens as they may."""
        self._group = rank_group
        self._leader = leader
        self._adapters = adapters
        self._blocks = blocks
        self._token_budget = token_budget
        self._manager: GptManager | None = None
        self._num_active = 0
        self._stops: dict[int, FinishReason] = {}
        self._shutting_down = False
        self._stats_were_skipped = False  # since the last ones that were made
        self.callbacks = Callbacks(
            get_inference_requests=self.get_inference_requests,
            send_response=self.send_response,
            poll_stop_signals=self.poll_stop_signals,
            return_batch_manager_stats=None if leader is None else leader.report_stats,
            wants_batch_manager_stats=self.wants_batch_manager_stats,
            step_ended=None if token_budget is None else token_budget.step_ended,
            end_iteration=None if leader is None else self.end_iteration,
        )

    def attach(self, manager: GptManager) -> None:
        """Set the manager that uses these callbacks; it is told when to shut down."""
        self._manager = manager

    def get_inference_requests(self, max_num_requests: int) -> list[Request]:
        if self._num_active == 0 and self._stats_were_skipped:
            self._report_idle_stats()
        if self._num_active == 0:
            self._report_events()
        rank_input = self._exchange(max_num_requests, may_block=self._num_active == 0)
        self._num_active += len(rank_input.requests)
        return rank_input.requests

    def send_response(self, request_id: int, result: Result | None, is_final: bool, error: RequestError | None) -> None:
        if is_final:
            self._num_active -= 1
            if self._blocks is not None:
                self._blocks.forget(request_id)
        if self._leader is None:
            return
        if error is None:
            self._leader.respond(Response(request_id=request_id, result=result))
        else:
            self._leader.respond(Response.of_error(request_id, error))

    def poll_stop_signals(self) -> dict[int, FinishReason]:
        if self._shutting_down:
            self._exchange(0, may_block=False)
        stops, self._stops = self._stops, {}
        return stops

    def wants_batch_manager_stats(self) -> bool:
        wanted = self._leader is not None and self._leader.wants_stats()
        self._stats_were_skipped = not wanted
        return wanted

    def end_iteration(self) -> None:
        leader, manager = self._leader, self._manager
        assert leader is not None and manager is not None
        if leader.wants_iteration_stats or leader.wants_request_stats:
            leader.report_iteration(
                manager.statistics() if leader.wants_iteration_stats else None,
                manager.request_statistics() if leader.wants_request_stats else None,
            )
        self._report_events()

    def _report_events(self) -> None:
        leader, manager = self._leader, self._manager
        if leader is None or manager is None or not manager.notes_kv_cache_events or not leader.wants_kv_cache_events:
            return
        events = manager.take_kv_cache_events()
        if events:
            leader.report_kv_cache_events(events)

    def _report_idle_stats(self) -> None:
        """Report the state in which the engine becomes idle; otherwise the fronts would keep showing an earlier one."""
        self._stats_were_skipped = False
        if self._leader is not None:
            assert self._manager is not None
            self._leader.report_stats(BatchManagerStats.of(self._manager.statistics()).to_json())

    def _exchange(self, max_requests: int, may_block: bool) -> RankInput:
        if self._leader is None:
            rank_input = decode_rank_input(self._group.broadcast(None))
        else:
            rank_input = self._leader.next_input(max_requests, may_block)
            if self._token_budget is not None and (token_budget := self._token_budget.take_change()):
                rank_input = structs.replace(rank_input, token_budget=token_budget)
            self._group.broadcast(encode_rank_input(rank_input))
        if rank_input is NO_INPUT:
            return rank_input
        self._stops.update(rank_input.stops)
        for request_id, sequence_index in rank_input.cancelled_sequences:
            assert self._manager is not None
            self._manager.cancel_sequence(request_id, sequence_index)
        if self._adapters is not None:
            self._adapters.follow(rank_input.adapters)
        if self._blocks is not None:
            self._blocks.follow(rank_input.blocks)
        if rank_input.token_budget:
            assert self._manager is not None
            self._manager.limit_tokens(rank_input.token_budget)
        if rank_input.now_ms:
            assert self._manager is not None
            self._manager.note_time(rank_input.now_ms)
        if rank_input.tick:
            self._group.barrier()
            if self._leader is not None:
                self._leader.all_ranks_answered()
        if rank_input.shutdown and not self._shutting_down:
            assert self._manager is not None
            self._shutting_down = True
            self._manager.shutdown()
        return rank_input
