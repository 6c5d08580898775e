"""Load on a server of OpenAI's API, by streams of this process's own.

Closed loop: so many requests are in flight at any time. Open loop: requests start at Poisson intervals however many are
in flight, and latency counts from the time at which a request was due, so that a server (or this process) that falls
behind cannot hide it. A request that fails is counted by its kind and does not stop the others.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import aiohttp

from inflight_client._exceptions import ConnectError, LoadTestError, UsageError
from inflight_client.load_test.prompts import Prompt, PromptOptions, make_prompts
from inflight_client.load_test.results import LevelResult, RequestTimeline, summarise
from inflight_client.load_test.server_facts import ServerFacts, read_engine
from inflight_client.load_test.sweep import Level, LoadMode

WARM_UP_TOKENS = 4
MAX_SENTENCE = 120
"""Characters of a server's error message that name a kind of failure."""
_SECOND = 1_000_000_000


class Endpoint(str, Enum):
    CHAT = "chat"
    """/v1/chat/completions: text alone."""
    COMPLETIONS = "completions"
    """/v1/completions: token ids, so prompts have exact lengths."""

    @property
    def path(self) -> str:
        return {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[self.value]


def parse_endpoint(text: str) -> Endpoint:
    try:
        return Endpoint(text)
    except ValueError:
        raise UsageError(f"{text!r} is no endpoint; write chat or completions") from None


@dataclass(frozen=True)
class Failure:
    """How a request failed, in words by which equal failures are counted."""

    kind: str
    was_connected: bool = True


class OpenAILoad:
    """See Load."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        endpoint: Endpoint,
        api_key: str,
        prompts: PromptOptions,
        level_timeout: float,
        request_ended: Callable[[], None],
    ) -> None:
        """`url`: of the server, with or without /v1. `api_key`: "" = none."""
        self._url = base_url(url)
        self._model = model
        self._endpoint = endpoint
        self._api_key = api_key
        self._prompts = prompts
        self._level_timeout = level_timeout
        self._request_ended = request_ended

    def warm_up(self) -> None:
        longest = replace(
            self._prompts, input_tokens=(self._prompts.input_tokens[1],) * 2, output_tokens=(WARM_UP_TOKENS,) * 2
        )
        (outcome,) = asyncio.run(self._send(Level(LoadMode.CONCURRENCY, 1, 1), self._make(longest, 1, "warm-up")))
        if isinstance(outcome, Failure):
            if not outcome.was_connected:
                raise ConnectError(f"no server answers at {self._url}: {outcome.kind}")
            raise LoadTestError(f"the server refuses the load test's requests: {outcome.kind}")

    def server_facts(self) -> ServerFacts:
        return read_engine(f"{self._url}/metrics", self._model, self._api_key)

    def measure(self, level: Level, number: int) -> LevelResult:
        outcomes = asyncio.run(self._send(level, self._make(self._prompts, level.num_requests, str(number))))
        errors = Counter(outcome.kind for outcome in outcomes if isinstance(outcome, Failure))
        answered = [outcome for outcome in outcomes if isinstance(outcome, RequestTimeline)]
        if not answered:
            kind, count = errors.most_common(1)[0]
            raise LoadTestError(f"{level.name}: no request was answered; {count} of {len(outcomes)}: {kind}")
        return summarise(level, answered, dict(errors.most_common()))

    def _make(self, options: PromptOptions, count: int, key: str) -> list[dict[str, Any]]:
        prompts = make_prompts(options, count, level=key, as_text=self._endpoint is Endpoint.CHAT)
        return [request_body(self._endpoint, self._model, prompt, options.temperature) for prompt in prompts]

    async def _send(self, level: Level, bodies: Sequence[dict[str, Any]]) -> list[RequestTimeline | Failure]:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        connector = aiohttp.TCPConnector(limit=0)
        no_limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        sending = self._closed_loop if level.mode is LoadMode.CONCURRENCY else self._open_loop
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=no_limit) as session:
            try:
                return await asyncio.wait_for(sending(session, level, bodies), self._level_timeout)
            except asyncio.TimeoutError:
                raise LoadTestError(f"{level.name}: not finished after {self._level_timeout:g} s") from None

    async def _closed_loop(
        self, session: aiohttp.ClientSession, level: Level, bodies: Sequence[dict[str, Any]]
    ) -> list[RequestTimeline | Failure]:
        remaining: Iterator[dict[str, Any]] = iter(bodies)  # of all workers together
        outcomes = []

        async def work() -> None:
            for body in remaining:
                outcomes.append(await self._ask(session, body, time.perf_counter_ns()))

        await asyncio.gather(*(work() for _ in range(int(level.value))))
        return outcomes

    async def _open_loop(
        self, session: aiohttp.ClientSession, level: Level, bodies: Sequence[dict[str, Any]]
    ) -> list[RequestTimeline | Failure]:
        generator = random.Random(f"{self._prompts.seed}/{level.name}")
        due, asked = time.perf_counter_ns(), []
        for body in bodies:
            await asyncio.sleep(max(due - time.perf_counter_ns(), 0) / _SECOND)
            asked.append(asyncio.create_task(self._ask(session, body, due)))
            due += int(generator.expovariate(level.value) * _SECOND)
        return list(await asyncio.gather(*asked))

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], sent: int) -> RequestTimeline | Failure:
        try:
            async with session.post(self._url + self._endpoint.path, json=body) as response:
                if response.status != 200:
                    return Failure(f"{response.status}: {_sentence(await response.read())}")
                return await _read_stream(response, sent)
        except aiohttp.ClientConnectorError as error:
            return Failure(error.os_error.strerror or str(error), was_connected=False)
        except aiohttp.ClientError as error:
            return Failure(f"the connection broke: {type(error).__name__}")
        except (ValueError, KeyError, TypeError, AttributeError):
            return Failure("the stream is not one of OpenAI's API")
        finally:
            self._request_ended()


def base_url(url: str) -> str:
    """The server's URL without /v1, which its paths begin with."""
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")


def request_body(endpoint: Endpoint, model: str, prompt: Prompt, temperature: float) -> dict[str, Any]:
    """A streamed request whose answer no end token shortens (`ignore_eos`, which vLLM knows, too)."""
    asked = {"messages": [{"role": "user", "content": prompt.content}]}
    return {
        "model": model,
        **(asked if endpoint is Endpoint.CHAT else {"prompt": prompt.content}),
        "max_tokens": prompt.max_tokens,
        "temperature": temperature,
        "seed": prompt.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _read_stream(response: aiohttp.ClientResponse, sent: int) -> RequestTimeline | Failure:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is no event of OpenAI's API."""
    with_text: list[int] = []
    with_choices: list[int] = []
    usage: dict[str, Any] | None = None
    ended = sent
    async for ended, event in _events(response):
        if "error" in event:
            return Failure(f"in the stream: {_message(event)}")
        usage = event.get("usage") or usage
        if choices := event.get("choices"):
            with_choices.append(ended)
            if any(_has_text(choice) for choice in choices):
                with_text.append(ended)
    if usage is None or not with_choices:
        return Failure("the stream ended without usage")
    # A text may be empty for tokens that only have one together with later tokens.
    return RequestTimeline(
        sent=sent,
        responses=tuple(with_text or with_choices),
        tokens=None,
        num_tokens=int(usage["completion_tokens"]),
        ended=ended,
        num_input_tokens=int(usage["prompt_tokens"]),
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """(arrival in nanoseconds, content) of each event but [DONE]."""
    unread = b""
    async for piece in response.content.iter_any():
        arrived = time.perf_counter_ns()
        *frames, unread = (unread + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for frame in frames:
            data = b"".join(line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:"))
            if data and data != b"[DONE]":
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError
                yield arrived, event


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    texts = (choice.get("text"), *(delta.get(name) for name in ("content", "reasoning", "reasoning_content")))
    return any(texts)


def _sentence(body: bytes) -> str:
    try:
        content = json.loads(body)
    except ValueError:
        return "no reason"
    return _message(content) if isinstance(content, dict) else "no reason"


def _message(content: dict[str, Any]) -> str:
    error = content.get("error", content.get("detail"))
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "no reason")[:MAX_SENTENCE]
