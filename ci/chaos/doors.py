"""The ways in which a request reaches the server, each as a coroutine that returns its Answer: gRPC, our client, HTTP,
OpenAI's API. An error becomes `Answer.error`, with a code in brackets; none is raised."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import grpc
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
from raw_stream import tensors as as_tensors
from tritonclient.utils import InferenceServerException

from ci.chaos.answer import Answer
from inflight_client import AsyncClient, ClientError

Arrived = Callable[[], None]
"""Called at each response, as soon as it is there."""

HTTP_CODES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    413: "INVALID_ARGUMENT",
    429: "UNAVAILABLE",
    503: "UNAVAILABLE",
}
TORN = "the stream ended without its last response [TORN]"


async def ask_grpc(
    url: str,
    arrived: Arrived,
    *,
    tensors: Mapping[str, Any],
    model: str = "llm",
    outputs: tuple[str, ...] = (),
    request_id: str = "",
    is_revised: bool = False,
) -> Answer:
    """One request on a gRPC stream of its own, whose tensors go as they are. `is_revised`: see Answer."""
    answer = Answer(is_revised=is_revised)
    request = {
        "model_name": model,
        "inputs": as_tensors(dict(tensors)),
        "request_id": request_id,
        "outputs": [grpcclient.InferRequestedOutput(name) for name in outputs] or None,
        "parameters": {"triton_enable_empty_final_response": True},
    }

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield request

    try:
        async with grpcaio.InferenceServerClient(url) as client:
            responses = client.stream_infer(requests())
            try:
                async for result, error in responses:
                    arrived()
                    if error is not None:
                        answer.error = str(error)
                        return answer
                    response = result.get_response()
                    if response.outputs:
                        found = {output.name: result.as_numpy(output.name) for output in response.outputs}
                        answer.add_tensors(found)
                    if response.parameters["triton_final_response"].bool_param:
                        return answer
            except asyncio.CancelledError:
                responses.cancel()
                raise
        answer.error = TORN
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.details()} [{error.code().name}]"
    except InferenceServerException as error:
        answer.error = f"{error.message()} [{str(error.status()).removeprefix('StatusCode.')}]"
    return answer


async def ask_client(url: str, arrived: Arrived, *, prompt: str, options: Mapping[str, Any]) -> Answer:
    """By `inflight_client`."""
    answer = Answer()
    try:
        async with AsyncClient(url) as client, client.stream(prompt, **options) as stream:
            async for chunk in stream:
                arrived()
                answer.add_text("text", chunk.text, index=chunk.sequence_index)
                answer.add_text("finish_reason", chunk.finish_reason or "", index=chunk.sequence_index)
    except ClientError as error:
        answer.error = f"{type(error).__name__}: {error.message} [{error.code or 'UNAVAILABLE'}]"
    return answer


async def ask_generate_stream(url: str, arrived: Arrived, *, body: Mapping[str, Any]) -> Answer:
    """By tritonserver's HTTP extension for streams."""
    answer = Answer()

    def take(event: dict[str, Any]) -> None:
        if "error" in event:
            answer.error = str(event["error"])
            return
        answer.add_text("text", event.get("text_output", ""), index=event.get("sequence_index", 0))
        answer.add_text("finish_reason", event.get("finish_reason", ""), index=event.get("sequence_index", 0))

    await _post(f"{url}/v2/models/llm/generate_stream", body, answer, take, arrived)
    if not answer.error and not answer.texts.get("finish_reason 0"):
        answer.error = TORN
    return answer


async def ask_openai(url: str, arrived: Arrived, *, path: str, body: Mapping[str, Any]) -> Answer:
    """By OpenAI's completions, chats or responses, streamed."""
    answer, is_done = Answer(), False

    def take(event: dict[str, Any]) -> None:
        nonlocal is_done
        if event.get("error"):
            kind = event["error"].get("code") or event["error"].get("type")
            answer.error = f"{event['error'].get('message')} [{HTTP_CODES.get(kind, kind)}]"
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            answer.add_text("text", text, index=choice["index"])
            answer.add_text("finish_reason", choice.get("finish_reason") or "", index=choice["index"])
        if event.get("usage"):
            usage = {name: count for name, count in event["usage"].items() if isinstance(count, int)}
            answer.add_text("usage", json.dumps(usage, sort_keys=True))
        kind = event.get("type", "")
        if kind == "response.output_text.delta":
            answer.add_text("text", event["delta"])
        is_done = is_done or event.get("done", False) or kind in ("response.completed", "response.incomplete")
        if kind == "response.failed":
            answer.error = f"{event['response'].get('error')} [UNAVAILABLE]"

    await _post(f"{url}{path}", body, answer, take, arrived)
    if not answer.error and not is_done:
        answer.error = TORN
    return answer


async def _post(
    url: str, body: Mapping[str, Any], answer: Answer, take: Callable[[dict[str, Any]], None], arrived: Arrived
) -> None:
    """Every event of a streamed answer is handed to `take`; OpenAI's end is {"done": True}."""
    try:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as response:
            if response.status != 200:
                answer.error = f"{await response.text()} [{HTTP_CODES.get(response.status, response.status)}]"
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    arrived()
                    data = line.removeprefix(b"data: ").strip()
                    take({"done": True} if data == b"[DONE]" else json.loads(data))
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.error = f"{type(error).__name__}: {error} [UNAVAILABLE]"
