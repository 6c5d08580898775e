"""genai-perf and aiperf, NVIDIA's load generators: what they send, and they themselves where they are installed.

genai-perf writes inputs and has perf_analyzer send them. `perf_analyzer` here does the same with inputs as version
0.0.16 writes them. The programs' dependencies exclude versions that this project has, so they stand in environments of
their own: INFLIGHT_GENAI_PERF and INFLIGHT_AIPERF name the programs, unless they are on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from server_process import MODEL_REPOSITORY

from inflight_client.load_test.perf_analyzer import PerfAnalyzer

TOKENIZER = MODEL_REPOSITORY / "llm" / "1" / "checkpoint"
MAX_TOKENS = 8
NUM_REQUESTS = 12
PROMPTS = (" sword that killd thee Dies PINDARUS So I am free yet", "ure now What sport tonight CLEOPATRA Hear")
"""genai-perf cuts them from Shakespeare, a number of tokens of any place."""

_KSERVE = ("-i", "grpc", "--streaming", "--service-kind", "triton")
_OPENAI = ("-i", "http", "--service-kind", "openai", "--endpoint")
ARGUMENTS = {
    "tensorrtllm": (*_KSERVE, "--shape", "max_tokens:1", "--shape", "text_input:1"),
    "vllm": _KSERVE,
    "chat": (*_OPENAI, "v1/chat/completions"),
    "completions": (*_OPENAI, "v1/completions"),
}
"""Backend, or kind of an OpenAI endpoint -> what genai-perf passes to perf_analyzer."""


def inputs_of(kind: str, model: str, prompt: str) -> dict[str, Any]:
    """One entry of genai-perf's inputs.json."""
    if kind == "chat":
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    elif kind == "completions":
        asked = {"prompt": [prompt]}
    else:
        asked = {"model": model, "text_input": [prompt], "exclude_input_in_output": [True], "stream": [True]}
        own = {"max_tokens": [MAX_TOKENS]}
        return asked | (own if kind == "tensorrtllm" else {"sampling_parameters": [f'{{"max_tokens":"{MAX_TOKENS}"}}']})
    return {"payload": [{"model": model, **asked, "stream": True, "max_tokens": MAX_TOKENS}]}


def perf_analyzer(scratch: Path, kind: str, model: str, address: str) -> list[dict[str, Any]]:
    """The requests of a run, as perf_analyzer exports them. `address`: host:port."""
    analyzer = PerfAnalyzer(scratch)
    inputs, export = scratch / "inputs.json", scratch / "profile_export.json"
    inputs.write_text(json.dumps({"data": [inputs_of(kind, model, prompt) for prompt in PROMPTS]}))
    command = [*analyzer._binary, "-m", model, "--async", "--stability-percentage", "999", *ARGUMENTS[kind]]
    command += ["-u", address, "--request-count", str(NUM_REQUESTS), "--concurrency-range", "3"]
    command += ["--input-data", str(inputs), "--profile-export-file", str(export)]
    done = subprocess.run(command, env=analyzer._environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment,) = json.loads(export.read_text())["experiments"]
    return list(experiment["requests"])


def find_program(name: str) -> str | None:
    return os.environ.get(f"INFLIGHT_{name.upper().replace('-', '_')}") or shutil.which(name)


def profile(program: str, scratch: Path, *arguments: str) -> Path:
    """Run genai-perf or aiperf; the folder of its results."""
    analyzer = PerfAnalyzer(scratch)
    own, theirs = Path(program).parent, Path(analyzer._binary[-1]).parent
    environment = {**analyzer._environment, "PATH": f"{theirs}:{own}:{os.environ['PATH']}"}
    results = scratch / "results"
    usual = ("--streaming", "--tokenizer", str(TOKENIZER), "--artifact-dir", str(results))
    size = ("--synthetic-input-tokens-mean", "20", "--output-tokens-mean", str(MAX_TOKENS))
    load = ("--concurrency", "3", "--request-count", str(NUM_REQUESTS))
    command = [program, "profile", *arguments, *usual, *size, *load]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, cwd=scratch)
    assert done.returncode == 0, done.stdout + done.stderr
    return results


def num_requests(results: Path) -> float:
    """That were answered, as the program's own report says."""
    (report,) = results.rglob("profile_export_*perf.json")
    return float(json.loads(report.read_text())["request_count"]["avg"])
