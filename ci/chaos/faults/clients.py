"""Clients that misbehave or die: nobody else may notice."""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random
from typing import Any

from ci.chaos.doors import ask_grpc, ask_openai
from ci.chaos.faults.fault import Fault
from ci.chaos.scene import ChaosFailed, Scene

PROMPT = {"text_input": "Once upon a time", "end_id": -1}
LARGE_BYTES = 12 * 2**20
LONG = {**PROMPT, "max_tokens": 1000, "stream": True}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an empty prompt": ({**PROMPT, "text_input": "", "max_tokens": 4}, "INVALID_ARGUMENT"),
    "no max_tokens": (PROMPT, "INVALID_ARGUMENT"),
    "a temperature that is no number": ({**PROMPT, "max_tokens": 4, "temperature": float("nan")}, "INVALID_ARGUMENT"),
    "bytes that are no text": ({**PROMPT, "text_input": b"\xff\xfe", "max_tokens": 4}, "INVALID_ARGUMENT"),
    "a token that does not exist": ({"input_ids": [5, 10**6], "max_tokens": 4}, "INVALID_ARGUMENT"),
    "a prompt that is too long": ({**PROMPT, "text_input": "word " * 10_000, "max_tokens": 4}, "INVALID_ARGUMENT"),
    "two million bytes": ({**PROMPT, "text_input": "x" * 2_000_000, "max_tokens": 4}, "INVALID_ARGUMENT"),
    "a hundred thousand stop words": ({**PROMPT, "max_tokens": 4, "stop_words": ["x"] * 100_000}, "INVALID_ARGUMENT"),
    "an adapter outside its folder": ({**PROMPT, "max_tokens": 4, "lora_name": "../checkpoint"}, "INVALID_ARGUMENT"),
    "a grammar that is none": (
        {
            **PROMPT,
            "max_tokens": 4,
            "guided_decoding_guide_type": "ebnf_grammar",
            "guided_decoding_guide": "root ::= (",
        },
        "INVALID_ARGUMENT",
    ),
}
"""Requests that must be refused, each with its code."""


def _silent() -> None:
    pass


async def killed_client(scene: Scene, dice: Random) -> str:
    """A program, in the middle of its stream."""
    program = [sys.executable, "-m", "inflight_client.cli", "generate", "Once", "--max-tokens", "1000"]
    client = await asyncio.create_subprocess_exec(
        *program, "--url", scene.endpoints.grpc, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert client.stdout is not None
    await client.stdout.read(20)
    client.kill()
    await client.wait()
    return f"kill -9 {client.pid}"


async def client_that_never_reads(scene: Scene, dice: Random) -> str:
    """Long answers over both HTTP servers, whose bytes nobody takes."""
    openai = {"model": "llm", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "n": 4, "stream": True}
    asked = [
        (scene.endpoints.http, "/v2/models/llm/generate_stream", {**LONG, "num_return_sequences": 4}),
        (scene.endpoints.openai, "/v1/completions", openai),
    ]
    writers = []
    for address, path, body in asked:
        host, _, port = address.partition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.transport.pause_reading()
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        writers.append(writer)
    await asyncio.sleep(8.0)
    for writer in writers:
        writer.transport.abort()
    return f"{len(writers)} clients for 8 s"


async def cancel_storm(scene: Scene, dice: Random) -> str:
    """Requests that are cancelled anywhere between the queue and their middle; most are never begun."""
    asking = [asyncio.create_task(ask_grpc(scene.endpoints.grpc, _silent, tensors=LONG)) for _ in range(40)]
    for task in dice.sample(asking, len(asking)):
        await asyncio.sleep(dice.uniform(0.0, 0.1))
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return f"{len(asking)} requests"


async def bad_requests(scene: Scene, dice: Random) -> str:
    """Each is refused with one sentence and its code."""
    for what in dice.sample(sorted(BAD), len(BAD)):
        tensors, code = BAD[what]
        answer = await ask_grpc(scene.endpoints.grpc, _silent, tensors=tensors)
        if f"[{code}]" not in answer.error or answer.texts or len(answer.error) > 1024:
            raise ChaosFailed(f"{what}: {answer.error or answer.texts!r} instead of an error {code}")
    return f"{len(BAD)} requests"


async def bad_bodies(scene: Scene, dice: Random) -> str:
    """What is no request, to the OpenAI server."""
    bodies: list[dict[str, Any]] = [
        {"model": "nobody", "prompt": "Once"},
        {"model": "llm", "prompt": "Once", "max_tokens": -1},
        {"model": "llm", "prompt": "Once", "temperature": "warm"},
        {"model": "llm", "prompt": [10**7]},
        {"model": "llm", "prompt": "word " * 100_000},
    ]
    for body in bodies:
        url = f"http://{scene.endpoints.openai}"
        answer = await ask_openai(url, _silent, path="/v1/completions", body={**body, "stream": True})
        if "[INVALID_ARGUMENT]" not in answer.error and "[NOT_FOUND]" not in answer.error:
            raise ChaosFailed(f"{str(body)[:80]}: {answer.error or answer.texts!r} instead of a refusal")
    return f"{len(bodies)} bodies"


async def large_bodies(scene: Scene, dice: Random) -> str:
    """Several at once, to both servers, each far above what a prompt may have. (tritonserver's own HTTP server does not
    survive them: see backend/SECURITY.md.)"""
    tensors = {**PROMPT, "text_input": "x" * LARGE_BYTES, "max_tokens": 4}
    body = {"model": "llm", "prompt": "x" * LARGE_BYTES, "max_tokens": 4, "stream": True}
    url = f"http://{scene.endpoints.openai}"
    by_grpc = [ask_grpc(scene.endpoints.grpc, _silent, tensors=tensors) for _ in range(4)]
    by_http = [ask_openai(url, _silent, path="/v1/completions", body=body) for _ in range(4)]
    for answer in await asyncio.gather(*by_grpc, *by_http):
        if "[INVALID_ARGUMENT]" not in answer.error:
            raise ChaosFailed(f"{LARGE_BYTES} bytes: {answer.error[:1000] or answer.texts!r} instead of a refusal")
    return f"8 bodies of {LARGE_BYTES >> 20} MiB"


async def noise(scene: Scene, dice: Random) -> str:
    """Random bytes, half a request, and connections that say nothing, to every port."""
    addresses = [scene.endpoints.grpc, scene.endpoints.http, scene.endpoints.metrics, scene.endpoints.openai]
    starts = [b"", dice.randbytes(4096), b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"]
    writers = []
    for address in addresses:
        host, _, port = address.partition(":")
        for start in starts * 4:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(start)
            writers.append(writer)
    await asyncio.sleep(2.0)
    for writer in writers:
        writer.transport.abort()
    return f"{len(writers)} connections"


async def same_id(scene: Scene, dice: Random) -> str:
    """Of two requests with one id, the second is refused and the first goes on."""
    name, both = f"twin-{dice.getrandbits(32)}", asyncio.Event()
    first = asyncio.create_task(
        ask_grpc(scene.endpoints.grpc, both.set, tensors={**LONG, "max_tokens": 200}, request_id=name)
    )
    await asyncio.wait({first, asyncio.create_task(both.wait())}, return_when=asyncio.FIRST_COMPLETED)
    second = await ask_grpc(scene.endpoints.grpc, _silent, tensors=LONG, request_id=name)
    answer = await first
    if "[ALREADY_EXISTS]" not in second.error or answer.error:
        raise ChaosFailed(f"the second: {second.error or 'served'}; the first: {answer.error or 'served'}")
    return "2 requests"


CLIENTS = (
    Fault(name="a client is killed", inject=killed_client),
    Fault(name="clients never read", inject=client_that_never_reads),
    Fault(name="a storm of cancels", inject=cancel_storm),
    Fault(name="large bodies", inject=large_bodies),
    Fault(name="bad requests", inject=bad_requests),
    Fault(name="bad bodies", inject=bad_bodies),
    Fault(name="noise on every port", inject=noise),
    Fault(name="two requests with one id", inject=same_id),
)
