"""A tritonserver without our supervisor: the backend in a directory of its own, all models loaded at once."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_stream import RawStream
from server_process import MODEL_REPOSITORY, ROOT

from inflight.run_directory import RUN_DIRECTORY

from .conftest import GOLDEN, text

DEADLINE = 180.0
COMMAND = [sys.executable, "-m", "inflight_client.cli", "backend-dir"]


def environment() -> dict[str, str]:
    sources = os.pathsep.join(str(ROOT / folder) for folder in ("backend", "kernels", "client"))
    inherited = {name: value for name, value in os.environ.items() if name != RUN_DIRECTORY}
    return {**inherited, "PYTHONPATH": sources}


def lay_out(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, str(directory)], capture_output=True, text=True, env=environment(), check=False)


@pytest.fixture
def grpc_url(tmp_path: Path) -> Iterator[str]:
    """Of a server that the printed commands have started."""
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / "llm").symlink_to(MODEL_REPOSITORY / "llm")
    (repository / "vllm_model").symlink_to(ROOT / "backend" / "apis" / "vllm" / "vllm_model")
    printed = lay_out(tmp_path / "backend")
    assert printed.returncode == 0, printed.stderr
    ports = {protocol: free_port() for protocol in ("http", "grpc", "metrics")}
    listening = " ".join(f"--{protocol}-address=127.0.0.1 --{protocol}-port={port}" for protocol, port in ports.items())
    *exports, command = printed.stdout.replace("FOLDER", shlex.quote(str(repository))).splitlines()
    prefix = f"inflight_own_{os.getpid()}_"
    script = "\n".join(
        [*exports, f"exec {command} {listening} --backend-config=python,shm-region-prefix-name={prefix}"]
    )
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(["bash", "-c", script], stdout=log, stderr=log, env=environment())
    try:
        wait_until_ready(server, ports["http"], tmp_path / "log")
        yield f"127.0.0.1:{ports['grpc']}"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(DEADLINE)
        finally:
            server.kill()
            for region in Path("/dev/shm").glob(f"{prefix}*"):
                region.unlink()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.1)


def test_a_dialect_model_waits_for_its_engine(grpc_url: str) -> None:
    with RawStream(grpc_url) as wire:
        said = text('{"max_tokens": 8, "temperature": 0}', 1)
        inputs = {"text_input": text(GOLDEN["prompt"], 1), "sampling_parameters": said}
        answer = wire.ask(inputs, model="vllm_model")
        own = wire.ask({"input_ids": GOLDEN["prompt_ids"], "max_tokens": 8})
    assert own.token_ids == GOLDEN["prompt_ids"] + GOLDEN["token_ids"][:8]
    assert answer.text.startswith(GOLDEN["prompt"]) and own.text.endswith(answer.text.removeprefix(GOLDEN["prompt"]))


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = lay_out(tmp_path)
    assert refused.returncode == 2 and re.search("is not empty: name a folder", refused.stderr)
