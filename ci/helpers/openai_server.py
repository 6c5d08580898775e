"""An OpenAI server on a played engine, in a thread of the tests' process, and the engine that plays a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fake_executor import FakeExecutor
from fake_tokenizer import END, byte_tokenizer

from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.executor.front.front import Front
from inflight.http.model import Model
from inflight.http.model_engine import ModelEngine
from inflight.http.serve import OpenAIServer, listen
from inflight.openai_options import OpenAIOptions
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, NamedTensor, Response, Result
from inflight.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{% if mood %}({{ mood }}){% endif %}"
    "{% if think %}<think>\n{% endif %}"
)
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
END_ID = byte_tokenizer().end_ids[0]
TEXT = "Hello, world"

CLIENT = httpx.Client(timeout=180, trust_env=False, verify=False)
"""Of all tests: to make one takes longer than most of them."""

Script = Callable[[Request], list[Response]]


def say(text: str = TEXT, *, ends: bool = True, num_cached: int = 0) -> Script:
    """Every sequence says `text`, a byte a token, as far as max_tokens goes; then it ends, or `ends` is false and it
    goes on for ever. `num_cached`: tokens of the prompt that were in the KV cache."""

    def play(request: Request) -> list[Response]:
        ids = [*text.encode(), END_ID][: request.max_tokens]
        finish = FinishReason.END_ID if ids[-1] == END_ID else FinishReason.LENGTH
        if not ends:
            ids, finish = [*text.encode()], FinishReason.NOT_FINISHED
        groups = [[token] for token in ids] if request.streaming else [ids]
        count, responses = request.num_return_sequences, []
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1 and ends
            for index in range(count):
                responses.append(
                    result(
                        request,
                        group,
                        index=index,
                        finish=finish if is_last else FinishReason.NOT_FINISHED,
                        is_final=is_last and index == count - 1,
                        is_first=number == 0,
                        num_cached=num_cached,
                    )
                )
        return responses

    return play


def result(
    request: Request,
    ids: list[int],
    *,
    index: int = 0,
    finish: FinishReason = FinishReason.NOT_FINISHED,
    is_final: bool = False,
    is_first: bool = False,
    num_cached: int = 0,
) -> Response:
    """With log probabilities if they were asked for: -token / 256 of a token, and those of the tokens below it."""
    config, tensors = request.output_config, []
    if config.num_log_probs:
        tensors += _top("", ids, config.num_log_probs)
    if config.return_prompt_log_probs and is_first and index == 0:
        prompt = request.input_token_ids[1:]
        tensors.append(NamedTensor.of("prompt_log_probs", np.array(log_probs(prompt), np.float32)))
        if config.num_log_probs:
            tensors += _top("prompt_", prompt, config.num_log_probs)
    return Response(
        request_id=request.request_id,
        result=Result(
            output_token_ids=ids,
            log_probs=log_probs(ids) if config.return_log_probs else [],
            tensors=tensors,
            finish_reason=finish,
            is_final=is_final,
            is_sequence_final=finish is not FinishReason.NOT_FINISHED,
            sequence_index=index,
            num_cached_tokens=num_cached if is_first and index == 0 else 0,
        ),
    )


def log_probs(ids: Sequence[int]) -> list[float]:
    return [-token / 256 for token in ids]


def _top(prefix: str, ids: Sequence[int], count: int) -> list[NamedTensor]:
    table = np.array([[token - each for each in range(count)] for token in ids], np.int32).reshape(len(ids), count)
    values = np.sort(-np.abs(table).astype(np.float32) / 256, axis=1)[:, ::-1]
    return [
        NamedTensor.of(f"{prefix}top_token_ids", table),
        NamedTensor.of(f"{prefix}top_log_probs", np.ascontiguousarray(values)),
    ]


class PlayedEngine(FakeExecutor):
    """A front whose engine answers each request at once, as a script says."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        max_seq_len: int = 512,
        max_batch_size: int = 8,
        config: EngineConfig | None = None,
    ) -> None:
        super().__init__(config=config)
        self.script = script or say()
        self.requests: list[Request] = []
        """All that were sent."""
        limits = RequestLimits(
            vocab_size=300,
            max_seq_len=max_seq_len,
            max_input_len=max_seq_len - 1,
            kv_cache_tokens=10 * max_seq_len,
            max_batch_size=max_batch_size,
            num_adapter_slots=2,
        )
        self._replica_ready(limits, EngineDescription(device="cuda"), max_in_flight=0)

    @property
    def sent(self) -> Request:
        """The request sent last."""
        return self.requests[-1]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        ids = super().enqueue_requests(requests)
        self.requests += requests
        for request in requests:
            self.push(*self.script(request))
        return ids


@dataclass(frozen=True)
class Running:
    """A server that serves."""

    url: str
    """http://host:port"""
    engine: PlayedEngine

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """`body`: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return CLIENT.post(f"{self.url}{path}", content=data, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return CLIENT.get(f"{self.url}{path}", **options)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """What a stream's events hold: JSON, or "[DONE]"."""
        frames = self.post(path, {**body, "stream": True}).text.split("\n\n")
        assert frames.pop() == ""
        assert all(frame.startswith("data: ") for frame in frames)
        return [text if (text := frame[6:]) == "[DONE]" else json.loads(text) for frame in frames]


def complete(running: Running, prompt: Any = "ab", **body: Any) -> dict[str, Any]:
    """The first choice of a completion."""
    response = running.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 64, **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def ask(running: Running, **body: Any) -> dict[str, Any]:
    """The first choice of a chat."""
    response = running.post(CHATS, {**CHAT, **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def checkpoint_folder(folder: Path) -> Path:
    """A checkpoint's folder without weights: a chat template, and nothing else that the server reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


@contextlib.contextmanager
def openai_server(
    engine: Front,
    folder: Path,
    *,
    config: EngineConfig | None = None,
    tokenizer: Tokenizer | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    attach: Callable[[], Front] | None = None,
    **options: Any,
) -> Iterator[str]:
    """The server's URL. `folder`: of the checkpoint. `attach`: makes what the page watches, None = a played
    engine at rest. `options`: of OpenAIOptions."""
    settings = OpenAIOptions(port=0, drain_seconds=1.0, **options)
    config = config or EngineConfig(gpt_model_path=str(folder))
    server = OpenAIServer(settings, [Model(settings, config, tokenizer or byte_tokenizer())])
    played = ModelEngine(settings.engine, lambda: engine, attach or PlayedEngine, is_loaded=True)
    with serving(server, [played], settings, new_loop=new_loop) as url:
        yield url


@contextlib.contextmanager
def serving(
    server: OpenAIServer,
    engines: Sequence[ModelEngine],
    settings: OpenAIOptions,
    *,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[str]:
    """The URL of a server while it runs."""
    address: list[str] = []
    ready = threading.Event()

    def tell(where: str) -> None:
        address.append(where)
        ready.set()

    async def run() -> None:
        stopping.append((asyncio.get_running_loop(), stop := asyncio.Event()))
        with listen(settings.host, settings.port) as listener:
            await server.run(engines, listener, tell, stop)

    stopping: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def serve() -> None:
        loop = new_loop()
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()

    thread = threading.Thread(target=serve, name="openai-server", daemon=True)
    thread.start()
    assert ready.wait(50)
    url = f"http://{address[0]}"
    try:
        yield url
    finally:
        loop, stop = stopping[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(50)
        assert not thread.is_alive()


def numbered(engine: PlayedEngine) -> object:
    return next(iter(engine.enqueued.values()))


def wait_until(holds: Callable[[], bool]) -> None:
    """Half a minute at most."""
    pause = threading.Event()
    for _ in range(3000):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it never happened")
