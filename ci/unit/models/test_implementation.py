"""Which code computes a network, the engine's own or transformers', and that the log says why.

Run: pytest ci/unit/models/test_implementation.py
"""

import logging
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from model_driver import Driver, Work
from tiny_checkpoints import write_checkpoint
from transformers_checkpoints import CONFIGS, make_config
from transformers_runner import NUM_TOKENS, load, refusal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_the_log_says_which_way_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "apertus", CONFIGS["apertus"], 1)
    tiny_checkpoints.make_checkpoint(tmp_path / "llama", "llama")
    caplog.set_level(logging.INFO, "inflight")
    load(tmp_path / "apertus").close()
    load(tmp_path / "llama").close()
    load(tmp_path / "llama", model_impl="transformers").close()
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if "comput" in line and not line.startswith("the layers run in torch")]
    assert told[0].startswith("transformers' modelling code computes ApertusForCausalLM: ")
    assert "no layers of its own for ApertusForCausalLM" in told[0]
    assert told[1:] == [
        "the engine's own layers compute LlamaForCausalLM",
        "transformers' modelling code computes LlamaForCausalLM: model_impl is transformers",
    ]


def test_a_native_family_with_a_habit_that_is_not_native_goes_the_other_way(tmp_path: Path) -> None:
    config = make_config("llama", hidden_act="mish")
    checkpoint = write_checkpoint(tmp_path, config, 1)
    prompt, tokens = checkpoint.prompt(9, NUM_TOKENS)
    runner = load(tmp_path)
    assert Driver(runner).run([Work(prompt=prompt, max_tokens=NUM_TOKENS)]) == [tokens]
    runner.close()
    assert refusal(tmp_path, model_impl="native") == (
        f"model_impl is native, but {tmp_path}/config.json: hidden_act 'mish' is not supported; these are: "
        "silu, swish, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, relu2; set model_impl to auto"
    )


def test_native_is_refused_for_another_family(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["apertus"], 1)
    sentence = refusal(tmp_path, model_impl="native")
    assert sentence.startswith("model_impl is native, but ") and sentence.endswith("; set model_impl to auto")


def test_several_stages_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["apertus"], 1)
    sentence = refusal(tmp_path, pipeline_parallel_size=2)
    assert sentence.startswith(
        "pipeline_parallel_size is 2, but transformers' modelling code computes ApertusForCausalLM"
    )
    assert sentence.endswith("set pipeline_parallel_size to 1")


def test_whole_experts_of_a_network_without_any_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["apertus"], 1)
    assert refusal(tmp_path, tensor_parallel_size=2, moe_expert_parallel_size=2) == (
        f"moe_expert_parallel_size is 2, but ApertusForCausalLM of {tmp_path} has no experts that this engine "
        "computes; set moe_expert_parallel_size to 1"
    )


def test_layers_in_cpp_are_for_native_networks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, CONFIGS["apertus"], 1, dtype=torch.bfloat16)
    assert refusal(tmp_path, cpu_compile="true") == (
        "cpu_compile is true, but layers in C++ are the engine's own, and transformers computes these "
        "(key model_impl); set cpu_compile to auto or false"
    )
    caplog.set_level(logging.INFO, "inflight")
    load(tmp_path, dtype="bfloat16").close()
    assert any("the layers run in torch" in record.getMessage() for record in caplog.records)
