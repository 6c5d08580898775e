"""A tritonserver without our supervisor: the backend in a directory of its own, all models loaded at once."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from free_ports import free_port
from raw_stream import RawStream
from server_process import MODEL_REPOSITORY, ROOT

from inflight.run_directory import RUN_DIRECTORY

from .conftest import GOLDEN, text

DEADLINE = 300.0
COMMAND = [sys.executable, "-m", "inflight_client.cli", "backend-dir"]

OTHER_BACKEND = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        said = pb_utils.Tensor("said", np.array([b"the other backend"], np.object_))
        return [pb_utils.InferenceResponse([said]) for _ in requests]
"""
OTHER_CONFIG = """
backend: "other"
input [{ name: "asked" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "said" data_type: TYPE_STRING dims: [1] }]
"""


def environment() -> dict[str, str]:
    """What a user has: our packages are installed, and no variable names their folders."""
    return {name: value for name, value in os.environ.items() if name not in (RUN_DIRECTORY, "PYTHONPATH")}


def lay_out(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, str(directory)], capture_output=True, text=True, env=environment(), check=False)


@pytest.fixture(scope="module")
def grpc_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that the printed commands have started, with a second Python-based backend."""
    tmp_path = tmp_path_factory.mktemp("own")
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / "llm").symlink_to(MODEL_REPOSITORY / "llm")
    (repository / "vllm_model").symlink_to(ROOT / "backend" / "apis" / "vllm" / "vllm_model")
    printed = lay_out(tmp_path / "backend")
    assert printed.returncode == 0, printed.stderr
    other = next((tmp_path / "backend").rglob("inflight")).parent / "other"
    for path, text_of_it in (
        (other / "model.py", OTHER_BACKEND),
        (repository / "other" / "config.pbtxt", OTHER_CONFIG),
    ):
        path.parent.mkdir()
        path.write_text(text_of_it)
    (repository / "other" / "1").mkdir()
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


def test_another_backend_in_the_same_environment_gets_its_own_model(grpc_url: str) -> None:
    """Of two Python-based backends: tritonserver imports each one's program by the bare name `model`."""
    with grpc.InferenceServerClient(grpc_url) as client:
        asked = grpc.InferInput("asked", [1], "INT32")
        asked.set_data_from_numpy(np.array([1], np.int32))
        answer = client.infer("other", [asked])
        assert client.is_model_ready("llm")
    assert answer.as_numpy("said").tolist() == [b"the other backend"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = lay_out(tmp_path)
    assert refused.returncode == 2 and re.search("is not empty: name a folder", refused.stderr)
