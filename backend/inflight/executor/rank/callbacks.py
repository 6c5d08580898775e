"""GptManager's four callbacks, on every rank.

Whatever enters a rank enters here, by one broadcast in each iteration: at the end of it, when the number of free places
is known exactly. Stop signals that come with it are told to the manager by the next poll. While nothing is active the
leader waits for its fronts and the other ranks wait for the broadcast; every two seconds all of them meet in a barrier.
"""

from __future__ import annotations

from typing import Protocol

from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.gpt_manager import GptManager
from inflight.distributed.rank_group import RankGroup
from inflight.errors import RequestError
from inflight.executor.wire.messages import NO_INPUT, RankInput, decode_rank_input, encode_rank_input
from inflight.request import Request
from inflight.result import FinishReason, Response, Result


class Leader(Protocol):
    """What only the leader has: a way to the fronts. Called on the loop's thread."""

    def next_input(self, max_requests: int, may_block: bool) -> RankInput:
        """Deliver what was responded; then what the ranks must hear now. Waits for it, up to a tick, if it may."""

    def respond(self, response: Response) -> None:
        """Keep a response until the next input is asked for."""

    def wants_stats(self) -> bool:
        """Would statistics of this moment be read?"""

    def report_stats(self, json: str) -> None:
        """Keep the newest statistics."""

    def all_ranks_answered(self) -> None:
        """A tick's barrier was passed."""


class RankCallbacks:
    """One rank's side of the exchange; `leader` is None on all ranks but the first."""

    def __init__(self, rank_group: RankGroup, leader: Leader | None) -> None:
        self._group = rank_group
        self._leader = leader
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
        )

    def attach(self, manager: GptManager) -> None:
        """Name the manager whose callbacks these are, to be told when to end."""
        self._manager = manager

    def get_inference_requests(self, max_num_requests: int) -> list[Request]:
        if self._num_active == 0 and self._stats_were_skipped:
            self._report_idle_stats()
        rank_input = self._exchange(max_num_requests, may_block=self._num_active == 0)
        self._num_active += len(rank_input.requests)
        return rank_input.requests

    def send_response(self, request_id: int, result: Result | None, is_final: bool, error: RequestError | None) -> None:
        if is_final:
            self._num_active -= 1
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

    def _report_idle_stats(self) -> None:
        """The state in which the engine falls idle, for otherwise the fronts would go on showing an earlier one."""
        self._stats_were_skipped = False
        if self._leader is not None:
            assert self._manager is not None
            self._leader.report_stats(self._manager.statistics().to_json())

    def _exchange(self, max_requests: int, may_block: bool) -> RankInput:
        if self._leader is None:
            rank_input = decode_rank_input(self._group.broadcast(None))
        else:
            rank_input = self._leader.next_input(max_requests, may_block)
            self._group.broadcast(encode_rank_input(rank_input))
        if rank_input is NO_INPUT:
            return rank_input
        self._stops.update(rank_input.stops)
        if rank_input.tick:
            self._group.barrier()
            if self._leader is not None:
                self._leader.all_ranks_answered()
        if rank_input.shutdown and not self._shutting_down:
            assert self._manager is not None
            self._shutting_down = True
            self._manager.shutdown()
        return rank_input
