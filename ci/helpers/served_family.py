"""A family's checkpoint behind `inflight serve`, asked by the clients of OpenAI and of tensorrtllm_backend: all must
get the tokens and the text that transformers has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
from family_checkpoints import GPT_OSS, FamilyCheckpoint, Style, Wanted, write_family
from free_ports import free_port
from raw_stream import RawStream
from serve_command import Serving
from tiny_checkpoints import NearTie

MAX_TOKENS = 24
SIZES = ("--max-batch-size", "4", "--set", "max_tokens_in_paged_kv_cache=4096", "--set", "num_threads=1")
USUAL = ("--dtype", "float32", "--api", "tensorrtllm", "--no-demo", "--canary-period", "0", "--adopt-timeout", "0")
READY = re.compile(r"ready after ([\d.]+) s")
ALARMS = ("Traceback", "[ERROR]")
"""What nothing of a server that serves well writes."""


@dataclass
class Found:
    """What came of one family."""

    seconds: float = 0.0
    """Until it was ready."""
    engine: str = ""
    """What computes the layers, as the log says it."""
    complaints: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Addresses:
    openai: str
    grpc: str


def serve_and_ask(folder: Path, architecture: str, seed: int, *options: str) -> Found:
    """Write the family's checkpoint to `folder`, serve it and compare all answers. `options`: of `inflight serve`.
    Raises AssertionError with what it printed if it does not start or end."""
    checkpoint, completion, chat = write_with_answers(folder / "checkpoint", architecture, seed)
    log = folder / "server.log"
    found = Found()
    with serving(checkpoint.folder, found, "--log-file", str(log), *options) as addresses:
        with openai.OpenAI(base_url=f"{addresses.openai}/v1", api_key="none", max_retries=0) as client:
            _ask_openai(client, checkpoint.style, completion, chat, found)
        with RawStream(addresses.grpc) as stream:
            _ask_tensorrt_llm(stream, [completion, *filter(None, [chat])], found)
            _compare(found, "ensemble", _text_of_ensemble(stream, completion, found), completion.text)
    text = log.read_text(errors="replace")
    found.engine = "C++" if "the layers are compiled" in text else "torch"
    found.complaints += [f"the log: {line}" for line in text.splitlines() if any(alarm in line for alarm in ALARMS)][:3]
    return found


def write_with_answers(folder: Path, architecture: str, seed: int) -> tuple[FamilyCheckpoint, Wanted, Wanted | None]:
    """A checkpoint with a completion and a chat; of further seeds where answers of all questions depend on rounding."""
    for number in range(10):
        checkpoint = write_family(folder, architecture, seed + 1000 * number)
        try:
            chat = checkpoint.chat(MAX_TOKENS) if checkpoint.style.shape else None
            return checkpoint, checkpoint.completion(MAX_TOKENS), chat
        except NearTie:
            continue
    raise NearTie


@contextmanager
def serving(checkpoint: Path, found: Found, *options: str) -> Iterator[Addresses]:
    """`inflight serve` from ready to its end."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics", "openai")}
    listening = [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    server = Serving(str(checkpoint), *USUAL, *SIZES, *options, ports=listening)
    try:
        ready = READY.search(server.read_until("ready after"))
        assert ready is not None, server.output
        found.seconds = float(ready[1])
        yield Addresses(f"http://127.0.0.1:{ports['openai']}", f"127.0.0.1:{ports['grpc']}")
        code = server.interrupt()
        if code:
            found.complaints.append(f"the server ended with {code}: {server.output[-1000:]}")
    finally:
        server.close()


def _compare(found: Found, what: str, got: Any, wanted: Any) -> None:
    if got != wanted:
        found.complaints.append(f"{what}: {got!r} instead of {wanted!r}")


def _ask_openai(client: openai.OpenAI, style: Style, completion: Wanted, chat: Wanted | None, found: Found) -> None:
    (model,) = (each.id for each in client.models.list())
    usual: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "extra_body": {"return_token_ids": True},
    }
    whole: Any = client.completions.create(prompt=completion.asked, **usual).choices[0]
    _compare_choice(found, "completion", whole, whole.text, completion)
    parts: list[Any] = [
        event.choices[0] for event in client.completions.create(prompt=completion.asked, stream=True, **usual)
    ]
    _compare(found, "completion, streamed", "".join(part.text for part in parts), whole.text)
    _compare(found, "completion, streamed", _streamed_ids(parts), completion.token_ids)
    if chat is None:
        try:
            client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **usual)
            found.complaints.append("chat: a base model answers without a template")
        except openai.BadRequestError:
            pass
        return
    messages: Any = [{"role": "user", "content": chat.asked}]
    answer: Any = client.chat.completions.create(messages=messages, **usual).choices[0]
    text = answer.message.content or ""
    # Of random messages of harmony only those of one channel are the answer.
    _compare_choice(found, "chat", answer, chat.text if style is GPT_OSS else text, chat)
    deltas: list[Any] = [
        event.choices[0] for event in client.chat.completions.create(messages=messages, stream=True, **usual)
    ]
    _compare(found, "chat, streamed", "".join(part.delta.content or "" for part in deltas), text)
    _compare(found, "chat, streamed", _streamed_ids(deltas), chat.token_ids)


def _streamed_ids(choices: list[Any]) -> list[int]:
    """Those that bring none have no such field."""
    return [token for choice in choices for token in getattr(choice, "token_ids", None) or []]


def _compare_choice(found: Found, what: str, choice: Any, text: str, wanted: Wanted) -> None:
    _compare(found, f"{what}: prompt", choice.prompt_token_ids, wanted.prompt_ids)
    _compare(found, f"{what}: tokens", choice.token_ids, wanted.token_ids)
    _compare(found, f"{what}: text", text, wanted.text)
    ended = "length" if wanted.end_id < 0 else "stop"
    _compare(found, f"{what}: finish_reason", choice.finish_reason, ended)


def _ask_tensorrt_llm(stream: RawStream, questions: list[Wanted], found: Found) -> None:
    """In one response and streamed, with the tensors of NVIDIA's client."""
    for wanted in questions:
        for streams in (False, True):
            inputs = {
                "input_ids": np.array([wanted.prompt_ids], np.int32),
                "input_lengths": np.array([[len(wanted.prompt_ids)]], np.int32),
                "request_output_len": np.array([[MAX_TOKENS]], np.int32),
                "beam_width": np.array([[1]], np.int32),
                "temperature": np.array([[1.0]], np.float32),
                "runtime_top_k": np.array([[1]], np.int32),
                # NVIDIA's client sends one; without it no token ends an answer.
                "end_id": np.array([[wanted.end_id]], np.int32),
                "streaming": np.array([[streams]]),
                "exclude_input_in_output": np.array([[True]]),
            }
            answer = stream.ask(inputs, model="tensorrt_llm")
            token_ids = [
                token
                for response in answer.responses
                for token in response["output_ids"][0, 0, : int(response["sequence_length"][0, 0])].tolist()
            ]
            _compare(found, f"tensorrt_llm, streaming {streams}", (answer.error, token_ids), ("", wanted.token_ids))


def _text_of_ensemble(stream: RawStream, wanted: Wanted, found: Found) -> str:
    inputs = {
        "text_input": np.array([[wanted.asked.encode()]], object),
        "max_tokens": np.array([[MAX_TOKENS]], np.int32),
        "bad_words": np.array([[b""]], object),
        "stop_words": np.array([[b""]], object),
        "exclude_input_in_output": np.array([[True]]),
        "stream": np.array([[True]]),
    }
    answer = stream.ask(inputs, model="ensemble")
    _compare(found, "ensemble", answer.error, "")
    return b"".join(response["text_output"].reshape(-1)[0] for response in answer.responses).decode()
