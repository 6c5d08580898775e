"""Configurations as transformers completes them, and what is kept of them between starts.

Run: pytest ci/unit/models/test_hf_config.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kept_libraries import copy_libraries

from inflight.errors import ConfigurationError
from inflight.models import hf_config
from inflight.models.config import ModelConfig
from inflight.models.hf_config import read_hf_config, read_values

CHECKPOINT = Path(__file__).parents[3] / "model_repository" / "llm" / "1" / "checkpoint"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "configs"


@pytest.fixture
def libraries(tmp_path: Path) -> None:
    """Of the cache. Nothing is compiled for it."""
    copy_libraries(tmp_path / "cache")


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return path


def forbid_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Any:
        raise AssertionError("transformers was asked again")

    monkeypatch.setattr(hf_config, "read_hf_config", refuse)


def test_what_is_kept_is_what_transformers_says(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model", dtype="bfloat16", rope_theta=5e5)
    config = read_hf_config(path)
    first = read_values(path)
    assert len(list(cache.iterdir())) == 1
    forbid_transformers(monkeypatch)
    assert read_values(path) == first
    assert (first["rms_norm_eps"], first["num_key_value_heads"]) == (config.rms_norm_eps, 4)
    assert first["rope_parameters"]["rope_theta"] == 5e5 and first["dtype"] == "bfloat16"
    moved = write(tmp_path / "elsewhere", dtype="bfloat16", rope_theta=5e5)
    assert read_values(moved) == first


def test_another_file_is_read_anew(cache: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    assert read_values(path)["rms_norm_eps"] == 1e-6
    write(tmp_path / "model", rms_norm_eps=0.25)
    assert read_values(path)["rms_norm_eps"] == 0.25


@pytest.mark.parametrize("content", ["", "[]", '{"rms_norm', "\x00"])
def test_a_broken_kept_file_is_made_again(cache: Path, tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "model")
    first = read_values(path)
    (kept,) = cache.iterdir()
    kept.write_text(content)
    assert read_values(path) == first
    assert json.loads(kept.read_text()) == first


def test_a_folder_that_others_may_write_to_is_not_believed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model")
    first = read_values(path)
    (kept,) = cache.iterdir()
    kept.write_text(json.dumps({**first, "rms_norm_eps": 0.5}))
    cache.chmod(0o777)
    assert read_values(path) == first


def test_what_transformers_refuses_is_not_kept(cache: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model", num_hidden_layers="many")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="not a configuration that transformers accepts"):
            read_values(path)
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_a_second_start_imports_neither_transformers_nor_a_compiler_of_torch(libraries: None, cache: Path) -> None:
    program = (
        "import os, sys\n"
        "from inflight.config import EngineConfig\n"
        "from inflight.distributed.rank_group import SingleRank\n"
        "from inflight.runtime.model_runner import ModelRunner\n"
        "config = EngineConfig(gpt_model_path=sys.argv[1], device='cpu', max_tokens_in_paged_kv_cache=256)\n"
        "ModelRunner.load(config, SingleRank())\n"
        "print({'transformers', 'torch._dynamo'} & set(sys.modules), flush=True)\n"
        "os._exit(0)\n"
    )
    assert ModelConfig.load(CHECKPOINT).vocab_size == 2048  # keeps it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(CHECKPOINT)]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split("\n")[-2] == "set()", shown.stderr
