"""The leader's half of handing contexts over: the answers to context-only requests, and the arrival of what
generation-only ones need on every rank. Knows no queue and no front.

    context only      gets a key, under which every rank keeps its part of the prompt's blocks; its last Result gets
                      ContextPhaseParams
    generation only   all ranks are told to fetch; it waits until each has said that it has its part, or has not. If one
                      has not, all compute the prompt. Prompts that are being fetched, or are queued since, have no more
                      than max_tokens_in_buffer tokens together, unless it is one alone

To be used from one thread.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec
import zmq
from msgspec import structs

from inflight.block_groups import BlockGroups
from inflight.context_phase import ContextPhaseParams, ContextTransfer, RequestType
from inflight.distributed.sockets import machine
from inflight.errors import InvalidRequest
from inflight.executor.rank.block_transfer.block_transfer import reports_endpoint
from inflight.executor.wire.block_messages import (
    NO_BLOCK_ORDERS,
    BlockFetch,
    BlockOrders,
    Endpoint,
    Serves,
    report,
)
from inflight.executor.wire.context_state import ContextState, prompt_digest
from inflight.request import Request
from inflight.result import FinishReason, Response

logger = logging.getLogger(__name__)

KEY_BYTES = 16
OTHER_ENGINE = (
    "context_phase_params is of an engine with another checkpoint or layout of the KV cache: give both the same "
    "checkpoint, dtype, model_impl, cpu_compile, tokens_per_block, tensor_parallel_size, moe_expert_parallel_size, "
    "pipeline_parallel_size and speculative_model_dir"
)


@dataclass(slots=True)
class _Export:
    """A context-only request in flight."""

    request: Request
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    adapter: bytes = b""
    first_tokens: dict[int, int] = field(default_factory=dict)
    goes_on: bool = False
    """Some sequence of it was cut off."""

    @classmethod
    def of(cls, request: Request) -> _Export:
        """How earlier ranks have ended some of its sequences is not known: they may have been cut off."""
        delivered = [] if request.replay is None else request.replay.sequences
        first_tokens = {index: each.token_ids[0] for index, each in enumerate(delivered) if each.token_ids}
        return cls(request, first_tokens=first_tokens, goes_on=any(each.is_finished for each in delivered))


@dataclass(slots=True)
class _Arrival:
    """A generation-only request in flight."""

    state: ContextState | None
    """None = it cannot be fetched."""
    missing: set[int]
    """Ranks that have not said how it went."""
    number: int = 0
    """Of its fetch; 0 = there was no room for it yet."""
    is_complete: bool = True
    """No rank has said that it did not get its part."""

    @property
    def num_tokens(self) -> int:
        return 0 if self.state is None else self.state.num_tokens


class Contexts:
    def __init__(
        self,
        folder: Path,
        *,
        secret: bytes,
        layout: bytes,
        groups: BlockGroups,
        num_ranks: int,
        max_tokens: int,
    ) -> None:
        """`folder`: of the launch. `secret`: see context_state. `layout`: see `layout_digest`. `max_tokens`: of prompts
        that are fetched at the same time."""
        self._secret = secret
        self._layout = layout
        self._groups = groups
        self._num_ranks = num_ranks
        self._max_tokens = max_tokens
        self._machine = machine()
        self._endpoints: dict[int, Endpoint] = {}
        self._exports: dict[int, _Export] = {}  # by request id
        self._arrivals: OrderedDict[int, _Arrival] = OrderedDict()  # the same
        self._num_tokens = 0  # of those that were asked for
        self._numbers = count(1)
        self._fetches: list[BlockFetch] = []
        self._drops: list[int] = []
        self._context = zmq.Context()
        self._reports: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        previous = os.umask(0o177)
        try:
            self._reports.bind(reports_endpoint(folder))
        finally:
            os.umask(previous)

    # -- requests ------------------------------------------------------------------------------------------------------

    def take(self, request: Request) -> bool:
        """Begin with a request, and return whether it has to wait. Raises InvalidRequest."""
        if request.request_type is RequestType.CONTEXT_ONLY:
            self._exports[request.request_id] = _Export.of(request)
            return len(self._endpoints) < self._num_ranks
        params = request.context_phase_params
        if params is None:
            return False
        try:
            state = self._state_of(request, params)
        except InvalidRequest as error:
            if not request.goes_on:
                raise
            logger.info("a prompt is computed that other ranks have computed: %s", error)  # before these were replaced
            self._arrivals[request.request_id] = _Arrival(None, set())
            return False
        self._arrivals[request.request_id] = _Arrival(state, set(range(self._num_ranks)))
        self._ask()
        return True

    def _state_of(self, request: Request, params: ContextPhaseParams) -> ContextState:
        """Raises InvalidRequest if it is not of this request and of an equal engine."""
        state = ContextState.unseal(params.opaque_state, self._secret)
        if state.layout != self._layout or len(state.endpoints) != self._num_ranks:
            raise InvalidRequest(OTHER_ENGINE)
        if state.prompt != prompt_digest(request):
            raise InvalidRequest("context_phase_params is of another prompt: send it with the same inputs as before")
        return state

    def release(self, request_id: int) -> None:
        """The request is over, or was refused."""
        self._exports.pop(request_id, None)
        arrival = self._end_arrival(request_id)
        if arrival is None or not arrival.number:
            return
        untold = [fetch for fetch in self._fetches if fetch.request_id == request_id]
        if untold:
            self._fetches.remove(untold[0])
        else:
            self._drops.append(request_id)

    def begun(self, request_id: int) -> None:
        """The ranks have the request: they take what has arrived when it gets its row, and drop it at its end."""
        self._end_arrival(request_id)

    def _end_arrival(self, request_id: int) -> _Arrival | None:
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None and arrival.number:
            self._num_tokens -= arrival.num_tokens
            self._ask()
        return arrival

    def is_ready(self, request_id: int) -> bool:
        """Whether a request need not wait any more."""
        arrival = self._arrivals.get(request_id)
        if arrival is not None:
            return not arrival.missing
        return request_id not in self._exports or len(self._endpoints) == self._num_ranks

    def as_ranks_get_it(self, request: Request) -> Request:
        """The request once it is ready."""
        export = self._exports.get(request.request_id)
        adapter = b"" if request.loaded_adapter is None else request.loaded_adapter.digest
        if export is not None:
            export.adapter = adapter
            return structs.replace(request, context_transfer=ContextTransfer(export_key=export.key))
        arrival = self._arrivals.get(request.request_id)
        if arrival is None:
            return request
        # An adapter of this name may have other weights here.
        has_arrived = arrival.state is not None and arrival.is_complete and arrival.state.adapter == adapter
        return structs.replace(
            request,
            request_type=RequestType.CONTEXT_AND_GENERATION,
            context_phase_params=None,
            context_transfer=ContextTransfer(num_arrived_tokens=arrival.num_tokens if has_arrived else 0),
        )

    def answered(self, response: Response) -> Response:
        """A response of the ranks, with ContextPhaseParams if it is the last one to a context-only request."""
        export, result = self._exports.get(response.request_id), response.result
        if export is None or result is None:
            return response
        if result.output_token_ids:
            export.first_tokens[result.sequence_index] = result.output_token_ids[0]
        export.goes_on |= result.finish_reason is FinishReason.LENGTH and export.request.max_tokens > 1
        if not result.is_final or not export.goes_on:
            return response
        return structs.replace(response, result=structs.replace(result, context_phase_params=self._params(export)))

    def _params(self, export: _Export) -> ContextPhaseParams:
        request = export.request
        state = ContextState(
            layout=self._layout,
            prompt=prompt_digest(request),
            adapter=export.adapter,
            num_tokens=len(request.input_token_ids),
            key=export.key,
            machine=self._machine,
            endpoints=[self._endpoints[rank] for rank in range(self._num_ranks)],
        )
        return ContextPhaseParams(
            req_id=request.request_id,
            first_gen_tokens=[token for _, token in sorted(export.first_tokens.items())],
            opaque_state=state.seal(self._secret),
        )

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        return bool(self._fetches or self._drops)

    def take_orders(self) -> BlockOrders:
        """What all ranks are to fetch, and to drop, before they take the next requests."""
        if not self.has_orders:
            return NO_BLOCK_ORDERS
        orders, self._fetches, self._drops = BlockOrders(self._fetches, self._drops), [], []
        return orders

    def poll(self) -> None:
        """Learn what the ranks have fetched since the last call."""
        while True:
            try:
                frame = self._reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = report.decode(frame)
            except msgspec.DecodeError:
                logger.warning("dropped an invalid report of a rank")
                continue
            if isinstance(message, Serves):
                self._endpoints[message.rank] = message.endpoint
                continue
            arrival = self._arrivals.get(message.request_id)
            if arrival is not None and arrival.number == message.number:
                arrival.missing.discard(message.rank)
                arrival.is_complete &= message.has_arrived

    def close(self) -> None:
        self._reports.close(linger=0)
        self._context.term()

    def _ask(self) -> None:
        """Let the next prompts be fetched, in the order of their requests, as far as there is room."""
        for request_id, arrival in self._arrivals.items():
            state = arrival.state
            if state is None or arrival.number:
                continue
            if self._num_tokens and self._num_tokens + state.num_tokens > self._max_tokens:
                return
            arrival.number = next(self._numbers)
            self._num_tokens += state.num_tokens
            self._fetches.append(
                BlockFetch(
                    request_id=request_id,
                    number=arrival.number,
                    key=state.key,
                    endpoints=state.endpoints,
                    is_local=state.machine == self._machine,
                    num_blocks=len(self._groups.handed_over(state.num_tokens)),
                )
            )
