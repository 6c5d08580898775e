"""Requests with adapters on the leader: they wait outside the queue, and orders are answered without the ranks."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from harness import make_request

from inflight.errors import InvalidRequest
from inflight.executor.rank.leader.request_book import RequestBook
from inflight.lora import LoadedAdapter, LoRARequest
from inflight.request import Request
from inflight.result import Response, Result
from inflight.runtime.adapters.adapter_library import Adapter, AdapterState

A = b"front a"


def answers(book: RequestBook) -> list[tuple[int, str, str]]:
    responses = book.collect_responses().get(A, [])
    return [(response.request_id, response.error_code, response.error_msg) for response in responses]


class Library:
    """Adapters by name, loaded when the test says so."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.has_orders = False

    def lease(self, request: Request) -> Adapter:
        assert request.lora_request is not None
        name = request.lora_request.lora_name
        if name == "unknown":
            raise InvalidRequest("there is none")
        adapter = self.adapters.setdefault(name, Adapter(len(self.adapters) + 1, None, Future()))
        adapter.num_leases += 1
        return adapter

    def release(self, adapter: Adapter) -> None:
        adapter.num_leases -= 1

    def forget(self, request: Request) -> None:
        assert request.lora_request is not None
        if self.adapters.pop(request.lora_request.lora_name, None) is None:
            raise InvalidRequest("it is not loaded")

    def poll(self) -> None:
        pass


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def adapted_book(library: Library) -> RequestBook:
    made: Any = library
    return RequestBook(adapters=made)


def adapted(request_id: int, name: str = "a", **options: Any) -> Request:
    return make_request(request_id, 2, lora_request=LoRARequest(name), **options)


def test_a_request_waits_for_its_adapter_outside_the_queue(adapted_book: RequestBook, library: Library) -> None:
    book = adapted_book
    book.submit(A, adapted(1))
    book.submit(A, make_request(2, 2))
    assert [request.request_id for request in book.take(5)[0]] == [2]
    assert book.is_preparing and book.num_queued == 1 and not book.has_input
    library.adapters["a"].state, library.adapters["a"].digest = AdapterState.READY, b"digest"
    ((request,), _) = book.take(5)
    assert (request.lora_request, request.loaded_adapter) == (None, LoadedAdapter(1, b"digest"))
    assert library.adapters["a"].num_leases == 1
    book.respond(Response(request_id=1, result=Result(is_final=True)))
    assert library.adapters["a"].num_leases == 0


def test_who_cannot_have_its_adapter_is_refused_and_leases_none(adapted_book: RequestBook, library: Library) -> None:
    book = adapted_book
    for request in (adapted(1), adapted(2), adapted(3, "unknown")):
        book.submit(A, request)
    book.cancel(A, [2])
    library.adapters["a"].state, library.adapters["a"].reason = AdapterState.BROKEN, "it is broken"
    book.poll_preparations()
    assert [(id_, text) for id_, _, text in answers(book)][:2] == [
        (3, "there is none"),
        (2, "request Id 2 has been stopped. Request is ignored."),
    ]
    assert library.adapters["a"].num_leases == 0 and book.num_in_flight == 0
    bare = RequestBook()
    bare.submit(A, adapted(5))
    assert answers(bare) == [(5, "INVALID_ARGUMENT", "this engine serves no LoRA adapters")]


def test_orders_are_answered_without_reaching_the_ranks(adapted_book: RequestBook, library: Library) -> None:
    book = adapted_book
    book.submit(A, adapted(1, lora_order="load"))
    assert book.take(5) == ([], {}) and answers(book) == []
    library.adapters["a"].state = AdapterState.READY
    assert book.take(5) == ([], {})
    ((response,),) = book.collect_responses().values()
    assert response.is_final and response.result is not None and response.result.output_token_ids == []
    book.submit(A, adapted(2, lora_order="unload"))
    book.submit(A, adapted(3, lora_order="unload"))
    assert answers(book) == [(2, "", ""), (3, "INVALID_ARGUMENT", "it is not loaded")]
    assert book.num_in_flight == 0


def test_only_the_leader_says_which_adapter_is_loaded(adapted_book: RequestBook) -> None:
    adapted_book.submit(A, make_request(1, 2, loaded_adapter=LoadedAdapter(9, b"")))
    assert answers(adapted_book)[0][:2] == (1, "INVALID_ARGUMENT")
