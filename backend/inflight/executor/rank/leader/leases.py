"""The grammars, low-rank adapters and contexts of other engines that requests in flight hold on the leader, from their
arrival to their end. Knows no queue and no front."""

from __future__ import annotations

from msgspec import structs

from inflight.context_phase import RequestType
from inflight.errors import InvalidRequest
from inflight.executor.rank.leader.contexts import Contexts
from inflight.executor.wire.block_messages import NO_BLOCK_ORDERS, BlockOrders
from inflight.guided_decoding import GuidedDecodingParams
from inflight.lora import NO_ORDERS, AdapterOrders
from inflight.request import Request
from inflight.request_limits import NOT_SPLIT
from inflight.result import Response
from inflight.runtime.adapters.adapter_library import Adapter, AdapterLibrary, AdapterState
from inflight.runtime.guided.grammars import Grammar, Grammars, GrammarState


class Leases:
    """To be used from one thread."""

    def __init__(
        self, grammars: Grammars | None, adapters: AdapterLibrary | None, contexts: Contexts | None = None
    ) -> None:
        """`grammars`: None = requests with a grammar are refused. `adapters`: the same for low-rank adapters.
        `contexts`: the same for requests that are split between engines."""
        self._grammars = grammars
        self._adapters = adapters
        self._contexts = contexts
        self._guided: dict[int, GuidedDecodingParams] = {}  # by request id
        self._adapted: dict[int, Adapter] = {}

    def take(self, request: Request) -> bool:
        """Lease what the request names until `release`, and return whether it names something. Raises InvalidRequest;
        then nothing is leased."""
        self._take_grammar(request)
        try:
            self._take_adapter(request)
            must_wait = self._take_context(request)
        except InvalidRequest:
            self.release(request.request_id)
            raise
        return must_wait or request.request_id in self._guided or request.request_id in self._adapted

    def _take_grammar(self, request: Request) -> None:
        params = request.guided_decoding_params
        if params is None:
            return
        if self._grammars is None:
            raise InvalidRequest("guided decoding is not supported by this engine")
        params.validate()
        self._grammars.lease(params)
        self._guided[request.request_id] = params

    def _take_adapter(self, request: Request) -> None:
        if request.lora_request is not None or request.lora_config is not None:
            self._adapted[request.request_id] = self._library().lease(request)

    def _take_context(self, request: Request) -> bool:
        if request.request_type is RequestType.CONTEXT_AND_GENERATION:
            return False
        if self._contexts is None:
            raise InvalidRequest(NOT_SPLIT)
        return self._contexts.take(request)

    def begun(self, request_id: int) -> None:
        """The ranks have the request."""
        if self._contexts is not None:
            self._contexts.begun(request_id)

    def release(self, request_id: int) -> None:
        """Give back what the request has leased, if it has."""
        if self._contexts is not None:
            self._contexts.release(request_id)
        params = self._guided.pop(request_id, None)
        if params is not None and self._grammars is not None:
            self._grammars.release(params)
        adapter = self._adapted.pop(request_id, None)
        if adapter is not None:
            self._library().release(adapter)

    def poll(self) -> None:
        """Learn what has become ready or broken since the last call."""
        if self._adapters is not None:
            self._adapters.poll()
        if self._contexts is not None:
            self._contexts.poll()

    def broken_reason(self, request_id: int) -> str:
        """Why a request that waits can never start; empty if it may."""
        grammar = self._grammar_of(request_id)
        if grammar is not None and grammar.state is GrammarState.BROKEN:
            return grammar.reason
        adapter = self._adapted.get(request_id)
        return adapter.reason if adapter is not None else ""

    def are_ready(self, request_id: int) -> bool:
        """Whether all that the request has leased is there."""
        if request_id in self._guided:
            grammar = self._grammar_of(request_id)
            if grammar is None or grammar.state is not GrammarState.READY:
                return False
        if self._contexts is not None and not self._contexts.is_ready(request_id):
            return False
        adapter = self._adapted.get(request_id)
        return adapter is None or adapter.state is AdapterState.READY

    def _grammar_of(self, request_id: int) -> Grammar | None:
        params = self._guided.get(request_id)
        return None if params is None or self._grammars is None else self._grammars.find(params)

    def as_ranks_get_it(self, request: Request) -> Request:
        """The request, once its leases are ready."""
        adapter = self._adapted.get(request.request_id)
        if adapter is not None:
            request = structs.replace(request, lora_request=None, loaded_adapter=adapter.loaded)
        return request if self._contexts is None else self._contexts.as_ranks_get_it(request)

    def answered(self, response: Response) -> Response:
        """A response of the ranks, with what the leader adds to it."""
        return response if self._contexts is None else self._contexts.answered(response)

    def forget_adapter(self, request: Request) -> None:
        """Make the name of the adapter that `request` unloads free; requests that use it keep it. Raises
        InvalidRequest."""
        self._library().forget(request)

    @property
    def has_orders(self) -> bool:
        """Whether the ranks are to store or to drop adapters or contexts."""
        return self._has_adapter_orders or (self._contexts is not None and self._contexts.has_orders)

    @property
    def _has_adapter_orders(self) -> bool:
        return self._adapters is not None and self._adapters.has_orders

    def take_orders(self) -> AdapterOrders:
        """What all ranks are to store and to drop before they take the next requests."""
        return self._adapters.take_orders() if self._adapters is not None and self._has_adapter_orders else NO_ORDERS

    def take_block_orders(self) -> BlockOrders:
        """The same of contexts."""
        return NO_BLOCK_ORDERS if self._contexts is None else self._contexts.take_orders()

    def _library(self) -> AdapterLibrary:
        if self._adapters is None:
            raise InvalidRequest("this engine serves no LoRA adapters")
        return self._adapters
