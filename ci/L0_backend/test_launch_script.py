"""`scripts/launch_triton_server.py`: tensorrtllm_backend's options, and MPI leader mode under tritonserver."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port

from inflight.supervisor import repository

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "launch_triton_server.py"
PATIENCE = 200


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--no-mpi", "--world_size", "2"], "--no-mpi starts one process: leave it out for --world_size 2"),
        (["--multi-model", "--disable-spawn-processes"], "every model starts its own ranks"),
        (["--multi-model", "--world_size", "2"], "leave out --world_size"),
        (["--tritonserver", "/nowhere"], "/nowhere is not an executable"),
        (["--force", "--model_repo", "/nowhere"], "/nowhere is not a folder: give a model repository"),
        (["--force", "--tensorrt_llm_model_name", "nobody"], "has no model nobody; its engine is llm"),
        (["--world_size", "0"], "--world_size must be at least 1, got 0"),
    ],
)
def test_what_it_cannot_do_is_refused_with_a_sentence(arguments: list[str], sentence: str) -> None:
    done = run("--force", *arguments)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("pipeline_parallel_size", "2", "pipeline_parallel_size 2 besides: set that to 1"),
        ("data_parallel_size", "2", "one set of them: set data_parallel_size to 1"),
    ],
)
def test_ranks_that_would_not_be_those_of_the_job_are_refused(
    tmp_path: Path, key: str, value: str, sentence: str
) -> None:
    """Those of the job would wait for ever."""
    repository.write(ROOT / "model_repository", tmp_path / "models", parameters={key: value})
    done = run("--force", "--world_size", "2", "--model_repo", str(tmp_path / "models"))
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr.splitlines()[-1]


@pytest.fixture
def leading_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, str]]:
    """(the process to end, http://host:port) of a server whose model leads two ranks."""
    directory = Path(tempfile.mkdtemp(prefix="user-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    ports = {name: free_port() for name in ("grpc", "http", "metrics")}
    given = [word for name, port in ports.items() for word in (f"--{name}_port", str(port))]
    with (directory / "log").open("wb") as log:
        started = subprocess.run(
            [sys.executable, str(SCRIPT), "--world_size", "2", "--force", "--oversubscribe", *given],
            stdout=log,
            stderr=log,
            check=False,
        )
    told = (directory / "log").read_text()
    assert started.returncode == 0, told
    found = re.search(r"kill (\d+) ends it", told)
    assert found is not None, told
    pid = int(found[1])
    yield pid, f"http://127.0.0.1:{ports['http']}"
    if is_alive(pid):
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_alive(pid), "the server has ended")
    wait_until(lambda: not left_over(directory), "no socket and no link is left")
    shutil.rmtree(directory)


def left_over(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_socket() or path.is_symlink()]


def test_its_ranks_are_an_mpi_job_that_ends_with_it(leading_server: tuple[int, str]) -> None:
    pid, url = leading_server
    wait_until(lambda: post(f"{url}/v2/models/llm/ready", method="GET") is not None, "the model is ready")
    first = generate(url)
    assert "output_ids" in first
    assert generate(url) == first
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_alive(pid), "the server has ended")


def generate(url: str) -> str:
    body = b'{"text_input": "Once upon a time", "max_tokens": 12, "stream": false}'
    return post(f"{url}/v2/models/llm/generate_stream", body) or ""


def post(url: str, body: bytes = b"", method: str = "POST") -> str | None:
    request = urllib.request.Request(url, data=body or None, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as got:
            return str(got.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)
