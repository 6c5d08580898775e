"""The console command as a user types it: a server started by it, and every other command against that server.

pytest ci/L0_llm/test_command_line.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_command import FREE_PORTS, PATIENCE, Serving, environment, inflight

from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import processes

ENDPOINT = re.compile(r'Client\("(?P<grpc>[\d.:]+)", model="llm"\)')
ADDRESS = re.compile(r"http://[\d.:]+")


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    started = Serving("--set", "max_num_tokens=1024", "--max-batch-size", "16")
    try:
        started.read_until("Ctrl-C stops the server")
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def url(serving: Serving) -> str:
    found = ENDPOINT.search(serving.output)
    assert found is not None, serving.output
    return found["grpc"]


def test_it_greets_with_a_completion_and_with_how_to_talk_to_it(serving: Serving) -> None:
    assert "Once upon a time, there was a happy fox named Rosa." in serving.output
    assert "curl -N" in serving.output and "inflight_client.cli chat" in serving.output, "as it was called"
    for alarming in ("Traceback", "[ERROR]", "WARNING", "error:"):
        assert alarming not in serving.output, serving.output


def test_the_curl_that_it_prints_streams(serving: Serving) -> None:
    lines = serving.output[serving.output.index("curl -N") :].split("\n\n")[0]
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, timeout=PATIENCE)
    events = [json.loads(line.removeprefix("data: ")) for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events).startswith(", there was a happy fox named Rosa.")
    assert events[-1]["finish_reason"] == "length"


def test_the_python_that_it_prints_runs(serving: Serving) -> None:
    lines = serving.output[serving.output.index("  from inflight_client") :].split("\n\n")[0]
    program = "\n".join(line[2:] for line in lines.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=PATIENCE
    )
    assert done.stdout.startswith(", there was a happy fox named Rosa."), done.stderr


def test_generate(url: str) -> None:
    done = inflight("generate", "Once upon a time", "--url", url, "--max-tokens", "12", "--stats")
    assert done.returncode == 0
    assert done.stdout == ", there was a happy fox named Rosa. She lived in\n"
    assert "5 prompt tokens, 12 tokens in" in done.stderr and "ended by length" in done.stderr
    piped = inflight("generate", "-", "--url", url, "--max-tokens", "12", text="Once upon a time")
    assert piped.stdout == done.stdout


def test_a_wrong_request_is_one_sentence(url: str) -> None:
    done = inflight("generate", "Once", "--url", url, "--temperature", "-1")
    assert done.returncode == 2 and done.stdout.strip() == ""
    assert done.stderr.startswith("inflight: ") and "temperature must be" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    nobody = inflight("generate", "Once", "--url", "127.0.0.1:1")
    assert nobody.returncode == 1 and len(nobody.stderr.splitlines()) == 1


def test_chat_remembers_what_was_said(url: str) -> None:
    done = inflight("chat", "--url", url, text="What is the capital of France?\nShow me a fox emoji.\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "🦊" in done.stdout


def test_load_test_measures_and_draws(url: str, tmp_path: Path) -> None:
    sizes = ("--requests", "12", "--input-tokens", "16", "--output-tokens", "8")
    done = inflight("load-test", "--url", url, "--concurrency", "1,4", *sizes, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    levels = json.loads((tmp_path / "results.json").read_text())["levels"]
    assert [level["value"] for level in levels] == [1, 4]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "TTFT ms" in done.stdout


def test_ctrl_c_leaves_nothing_behind(serving: Serving) -> None:
    """Runs last: it ends the server of this module."""
    (directory,) = run_directories(serving.process.pid)
    assert processes.marked(directory)
    assert serving.interrupt() == 0
    assert processes.marked(directory) == []
    assert not directory.exists()
    assert not list(Path("/dev/shm").glob(f"{directory.name.replace('-', '_', 1)}_*"))
    assert "Traceback" not in serving.output


def run_directories(supervisor: int) -> set[Path]:
    """Of the servers that this supervisor runs: its children carry them."""
    found = set()
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        prefix = f"{RUN_DIRECTORY}=".encode()
        with contextlib.suppress(OSError):  # it has ended
            entries = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {Path(os.fsdecode(entry[len(prefix) :])) for entry in entries if entry.startswith(prefix)}
    return found


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_a_folder_that_is_no_checkpoint_is_one_sentence(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    if kind == "empty":
        folder.mkdir()
    done = inflight("serve", str(folder), *FREE_PORTS)
    assert done.returncode == 2
    told = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert len(told) == 1 and str(folder) in told[0], told


def test_a_parameter_that_does_not_exist_names_the_nearest(tmp_path: Path) -> None:
    done = inflight("serve", "--set", "max_num_token=5", *FREE_PORTS)
    assert done.returncode == 2
    assert "max_num_tokens" in done.stderr and "Traceback" not in done.stderr
