"""genai-perf's requests and the load test, on the models for text of other backends.

pytest ci/L0_dialects/test_load_generators.py
"""

from __future__ import annotations

import json
from pathlib import Path

import load_generators
import pytest
from load_generators import NUM_REQUESTS, find_program
from server_process import ServerProcess
from typer.testing import CliRunner

from inflight_client.cli import app
from inflight_kernels.cpu import unsupported_reason

LAYERS = "native" if unsupported_reason() else "compiled"
MODELS = [("tensorrtllm", "ensemble"), ("vllm", "vllm_model")]


@pytest.mark.parametrize(("backend", "model"), MODELS)
def test_requests_of_genai_perf_are_answered(server: ServerProcess, tmp_path: Path, backend: str, model: str) -> None:
    requests = load_generators.perf_analyzer(tmp_path, backend, model, server.grpc_url)
    assert len(requests) >= NUM_REQUESTS
    for request in requests:
        assert len(request["response_timestamps"]) == len(request["response_outputs"])
        assert any(output["text_output"] for output in request["response_outputs"])


@pytest.mark.parametrize(("backend", "model"), MODELS)
@pytest.mark.skipif(find_program("genai-perf") is None, reason="there is no genai-perf: name it in INFLIGHT_GENAI_PERF")
def test_genai_perf(server: ServerProcess, tmp_path: Path, backend: str, model: str) -> None:
    program = find_program("genai-perf")
    assert program is not None
    options = ("-m", model, "--endpoint-type", "kserve", "--backend", backend, "-u", server.grpc_url)
    results = load_generators.profile(program, tmp_path, *options, "--num-dataset-entries", "6")
    assert load_generators.num_requests(results) == NUM_REQUESTS


@pytest.mark.parametrize("model", ["ensemble", "vllm_model"])
def test_the_load_test_measures_them(server: ServerProcess, tmp_path: Path, model: str) -> None:
    arguments = ["load-test", "--url", server.grpc_url, "--metrics-url", server.metrics_url, "-m", model]
    load = ["-c", "2", "--requests", "12", "--input-tokens", "8", "--output-tokens", "6", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, *load])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "results.json").read_text())
    (level,) = results["levels"]
    assert (level["num_requests"], level["num_output_tokens"]) == (12, 12 * 6)
    assert level["num_input_tokens"] >= 12 * 8
    engine = results["server"]["engine"]
    assert (engine["checkpoint"], engine["architecture"], engine["dtype"]) == (
        "checkpoint",
        "LlamaForCausalLM",
        "float32",
    )
    assert (engine["num_ranks"], engine["device"], engine["layers"]) == ("1", "cpu", LAYERS)
    assert results["server"]["tritonserver"] == "2.51.0"
