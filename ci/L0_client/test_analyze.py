"""`inflight analyze` with the real Model Analyzer: servers that it starts, and one that runs under a key.

pytest ci/L0_client/test_analyze.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from server_process import MODEL_REPOSITORY, ServerProcess
from typer.testing import CliRunner

from inflight_client.cli import app

pytestmark = pytest.mark.long

KEY = "a-key-of-the-operators"
ONE_POLICY = ["--batch-scheduler-policy", "guaranteed_no_evict", "--max-num-tokens", "256"]
SMALL = ["--concurrency", "2", "--requests", "2", "--input-tokens", "4", "--output-tokens", "2"]


def measured(folder: Path) -> list[tuple[str, str, int]]:
    """(max_batch_size, tokens_per_block, concurrency) of each measurement."""
    results = json.loads((folder / "results.json").read_text())["measurements"]
    assert all(each["requests_per_s"] > 0 and each["latency_ms"]["p99"] > 0 for each in results)
    return sorted((each["max_batch_size"], each["tokens_per_block"], each["concurrency"]) for each in results)


def test_servers_are_started_measured_and_ended(tmp_path: Path) -> None:
    folder = tmp_path / "with a blank"
    values = ["--max-batch-size", "1,8", "--tokens-per-block", "32"]
    result = CliRunner().invoke(app, ["analyze", *values, *ONE_POLICY, *SMALL, "--output", str(folder)])
    assert result.exit_code == 0, result.output
    assert measured(folder) == [("1", "32", 2), ("8", "32", 2)]
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("reports/summaries/llm/result_summary.*"))
    assert "llm_config_0" in result.output and "tokens_per_block 32" in result.output
    assert list(Path("/dev/shm").glob(f"inflight_{os.getpid()}_*")) == []


def test_a_running_server_is_measured_with_its_key_and_gets_its_configuration_back(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    with ServerProcess(model_repository=MODEL_REPOSITORY, api_key_file=key) as server:
        there = ["--url", server.grpc_url, "--metrics-url", server.metrics_url]
        run = ["analyze", *there, "--max-batch-size", "3", "--tokens-per-block", "32", *ONE_POLICY, *SMALL]
        with grpc.InferenceServerClient(server.grpc_url) as client:
            before = client.get_model_config("llm", as_json=True)
            refused = CliRunner().invoke(app, [*run, "--output", str(tmp_path / "none")])
            assert refused.exit_code == 2 and "start it with inflight serve --api-key-file" in refused.stderr
            result = CliRunner().invoke(app, [*run, "--api-key-file", str(key), "--output", str(tmp_path / "results")])
            assert result.exit_code == 0, result.output
            assert client.get_model_config("llm", as_json=True) == before
        assert measured(tmp_path / "results") == [("3", "32", 2)]
        assert KEY not in "".join(path.read_text(errors="replace") for path in (tmp_path / "results").rglob("*.log"))
        assert "again" not in server.told


def test_an_interrupted_analysis_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "inflight_client.cli", "analyze", *SMALL, "--output", str(tmp_path / "results")]
    environment = {**os.environ, "TMPDIR": tempfile.mkdtemp(dir=scratch)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "results" / "model-analyzer.log"
    deadline = time.monotonic() + 300
    while not log.exists() or "Creating model config" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    assert process.wait(200) == 130
    assert list(Path(environment["TMPDIR"]).iterdir()) == []
    assert list(Path("/dev/shm").glob(f"inflight_{process.pid}_*")) == []
