"""Errors from the engine's exception to the client's, over a gRPC server that plays tritonserver.

pytest ci/unit/client/test_errors.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_pb_utils as pb
import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight import errors
from inflight.server.reply import Reply
from inflight_client import AsyncClient, Cancelled, Client, ClientError, InvalidRequest, ServerFailure, Unavailable
from inflight_client._grpc import AsyncGrpcReplyStream, GrpcReplyStream

KINDS = {
    "INVALID_ARGUMENT": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "INTERNAL": ServerFailure,
}


def all_codes(kind: type[errors.InflightError] = errors.InflightError) -> set[str]:
    return {kind.code}.union(*(all_codes(below) for below in kind.__subclasses__()))


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every request with `error_message`, as tritonserver does without strict errors."""

    def __init__(self) -> None:
        self.error_message = ""
        self.headers: list[str] = []

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        self.headers += [key for key, _ in context.invocation_metadata()]
        for _ in requests:
            yield service_pb2.ModelStreamInferResponse(error_message=self.error_message)


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def url(servicer: Servicer) -> Iterator[str]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(grace=None).wait()


def ask(url: str) -> None:
    with Client(url, timeout=60) as client:
        client.generate("x", request_id="7")


def ask_asyncio(url: str) -> None:
    async def use() -> None:
        async with AsyncClient(url, timeout=60) as client:
            await client.generate("x", request_id="7")

    asyncio.run(use())


def test_the_engine_has_no_other_codes_than_these() -> None:
    assert all_codes() == set(KINDS)


@pytest.mark.parametrize("asking", [ask, ask_asyncio])
@pytest.mark.parametrize("code", KINDS)
def test_every_code_of_the_engine_reaches_the_caller(servicer: Servicer, url: str, asking: Any, code: str) -> None:
    sender = pb.ResponseSender()
    Reply(pb, sender).fail(code, "a sentence with a list [1, 2].")
    assert sender.error is not None
    servicer.error_message = sender.error.message()
    with pytest.raises(ClientError) as caught:
        asking(url)
    error = caught.value
    assert type(error) is KINDS[code]
    assert (str(error), error.code, error.request_id) == ("a sentence with a list [1, 2].", code, "7")


@pytest.mark.parametrize("asking", [ask, ask_asyncio])
def test_errors_are_not_asked_for_as_statuses(servicer: Servicer, url: str, asking: Any) -> None:
    """tritonserver 2.51 may die of the header."""
    servicer.error_message = "the step failed [INTERNAL]"
    with pytest.raises(ServerFailure):
        asking(url)
    assert servicer.headers and "triton_grpc_error" not in servicer.headers


class Messages:
    """A call whose error is followed by one more message. Notes whether it was read to its end."""

    is_read = False

    def __iter__(self) -> Iterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message="the step failed [INTERNAL]")
        yield service_pb2.ModelStreamInferResponse()
        self.is_read = True

    async def __aiter__(self) -> Any:
        for message in self:
            yield message


def read(messages: Messages) -> None:
    assert not list(GrpcReplyStream(messages, "7"))


def read_asyncio(messages: Messages) -> None:
    async def use() -> None:
        assert not [reply async for reply in AsyncGrpcReplyStream(messages, "7")]

    asyncio.run(use())


@pytest.mark.parametrize("reading", [read, read_asyncio])
def test_a_stream_with_an_error_is_read_to_its_end(reading: Any) -> None:
    """What is left unread would be cancelled, and a cancel that meets the final response is what servers die of."""
    messages = Messages()
    with pytest.raises(ServerFailure, match=r"^the step failed$"):
        reading(messages)
    assert messages.is_read
