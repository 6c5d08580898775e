"""Images at a real `inflight openai`: clients' packages, and what happens when what serves them dies.

Run: pytest ci/L0_openai/test_images.py
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from image_checkpoints import file_of, make_image, make_image_checkpoint
from server_process import is_rank

from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import processes

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180
NUM_TOKENS = 150
FILE = base64.b64encode(file_of(make_image(60, 33), "JPEG")).decode()
CONTENT: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{FILE}"}},
    {"type": "text", "text": "What is it?"},
]
ASKED: dict[str, Any] = {
    "model": "llm",
    "messages": [{"role": "user", "content": CONTENT}],
    "max_tokens": NUM_TOKENS,
    "temperature": 1.0,
    "seed": 3,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


class Running:
    def __init__(self, url: str, run_directory: Path) -> None:
        self.url, self._run_directory = url, run_directory

    def rank(self) -> int:
        (rank,) = filter(is_rank, processes.marked(self._run_directory))
        return rank

    def vision(self) -> int:
        (pid,) = (
            pid
            for pid in processes.marked(self._run_directory)
            if b"inflight.vision.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return pid


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_image_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llava-llama").folder
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("tmp")), RUN_DIRECTORY: ""}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("backend", "kernels", "client"))
    options = ("--port", "0", "--dtype", "float32", "--set", "num_threads=1", "--set", "max_seq_len=256")
    program = [sys.executable, "-m", "inflight_client.cli", "openai", str(folder), *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, env=environment, **pipes) as process:
        assert process.stderr is not None and process.stdout is not None
        told = [process.stderr.readline()]
        while "; run directory " not in told[-1]:
            assert told[-1], f"it has ended: {told}"
            told.append(process.stderr.readline())
        shown = next(line for line in process.stdout if "OpenAI's API: " in line)
        yield Running(shown.split()[2], Path(told[-1].split()[-1]))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url, api_key="none", max_retries=0) as client:
        yield client


def texts(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_both_packages_get_the_same_answer(running: Running, client: openai.OpenAI) -> None:
    greedy = {key: value for key, value in ASKED.items() if key not in ("stream", "seed", "extra_body")}
    answer = client.chat.completions.create(**{**greedy, "temperature": 0, "max_tokens": 20}).choices[0].message.content
    source = {"type": "base64", "media_type": "image/jpeg", "data": FILE}
    with anthropic.Anthropic(base_url=running.url.removesuffix("/v1"), api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model="llm",
            max_tokens=20,
            messages=[{"role": "user", "content": [{"type": "image", "source": source}, CONTENT[1]]}],
            extra_body={"temperature": 0},
        )
    assert message.content[0].text == answer


def test_a_rank_dies_and_the_answer_goes_on(running: Running, client: openai.OpenAI) -> None:
    undisturbed = texts(client.chat.completions.create(**ASKED))
    stream = client.chat.completions.create(**ASKED)
    text = next(stream).choices[0].delta.content or ""
    os.kill(running.rank(), signal.SIGKILL)
    assert text + texts(stream) == undisturbed


def test_the_vision_process_dies_and_the_next_image_is_read(running: Running, client: openai.OpenAI) -> None:
    undisturbed = texts(client.chat.completions.create(**ASKED))
    pid = running.vision()
    os.kill(pid, signal.SIGKILL)
    assert texts(client.chat.completions.create(**ASKED)) == undisturbed, "it has been seen"
    other = base64.b64encode(file_of(make_image(33, 60, seed=9))).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{other}"}}]
    asked = {**ASKED, "messages": [{"role": "user", "content": content}]}
    assert texts(client.chat.completions.create(**asked))
    assert running.vision() != pid
