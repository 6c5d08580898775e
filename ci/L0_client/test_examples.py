"""Every example of the client runs against a server with the default model, and prints what it says.

pytest ci/L0_client/test_examples.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
OF_OPENAI = {"responses"}
"""Run by ci/L0_openai."""
EXAMPLES = sorted(example for example in (ROOT / "client" / "examples").glob("*.py") if example.stem not in OF_OPENAI)
WEIGHTS = ROOT / "client" / "examples" / "lora_weights.py"
SHOWN = {
    "beam_search": "'",
    "beam_width_array": "beams [8, 4, 2]:",
    "drafts": "drafts were accepted",
    "guided_json": "'name'",
    "logits": "context_logits (",
    "lora": "pirate: '",
    "lora_weights": "weights: '",
    "prompt_embeddings": "embeddings: '",
    "resume": "resumed 0 times",
    "retention": "blocks were cached",
    "several_sequences": "sequence 2 (length): ",
    "speculative_sampling": "of 8 drafts became text: ",
}
"""What the output of each contains, besides."""


def run(example: Path, url: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "client")}
    command = [sys.executable, str(example), url]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_it_runs(server: ServerProcess, example: Path) -> None:
    assert SHOWN[example.stem] in run(example, server.grpc_url)


def test_examples_show_what_they_claim(server: ServerProcess) -> None:
    embedded, spelled = run(ROOT / "client/examples/prompt_embeddings.py", server.grpc_url).splitlines()
    assert embedded.partition(":")[2].strip() == spelled.partition(":")[2].strip()
    _, likeliest, chosen = run(ROOT / "client/examples/logits.py", server.grpc_url).splitlines()
    assert likeliest.partition(":")[2].strip() == chosen.partition(":")[2].strip()
    pirate, bullets, none = run(ROOT / "client/examples/lora.py", server.grpc_url).splitlines()
    assert len({each.partition(": ")[2] for each in (pirate, bullets, none)}) == 3
    sent = [line.split(":", 1)[1].strip() for line in run(WEIGHTS, server.grpc_url).splitlines()]
    assert sent == [pirate.partition(": ")[2], pirate.partition(": ")[2], none.partition(": ")[2]]
    kept = run(ROOT / "client/examples/retention.py", server.grpc_url).splitlines()
    assert kept and not any(": 0 of" in line for line in kept)
