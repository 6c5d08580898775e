"""Quantised checkpoints of classes that only transformers' code computes: the layers are the engine's own products.

Run: pytest ci/unit/models/test_transformers_formats.py
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_checkpoints import KINDS, SHAPE, write_coded_checkpoint
from model_driver import Driver, Work
from quantized_runs import change_tensors, write_quantization
from safetensors.torch import load_file
from tiny_checkpoints import make_prompt, write_checkpoint
from transformers import PreTrainedConfig
from transformers_checkpoints import EXPERTS as STACKED_EXPERTS
from transformers_checkpoints import GPT2, QWEN_EXPERTS, make_config
from transformers_runner import NUM_TOKENS, Sample, load, refusal, run

from inflight.layers.weight import DenseWeight
from inflight.models.replaced_experts import ReplacedExperts
from inflight.models.replaced_linear import ReplacedLinear
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.runtime.model_runner import ModelRunner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CONFIG = make_config("apertus", **{**SHAPE, "head_dim": 32})
EXPERTS = make_config("afmoe", **{**SHAPE, "head_dim": 32}, **QWEN_EXPERTS | {"moe_intermediate_size": 64})
NATIVE_TOO = [
    pytest.param(make_config("qwen3", **SHAPE | {"head_dim": 32}), id="qwen3"),
    # Experts with tensors of their own, and stacked ones.
    pytest.param(make_config("qwen3_moe", **SHAPE | QWEN_EXPERTS | {"head_dim": 32}), id="qwen3_moe"),
    pytest.param(make_config("granitemoe", **SHAPE | STACKED_EXPERTS | {"head_dim": 32}), id="granitemoe"),
    pytest.param(make_config("gpt2", **GPT2 | {"n_head": 2, "num_attention_heads": 2, "head_dim": 32}), id="gpt2"),
]


def layers_of(runner: ModelRunner) -> dict[str, ReplacedLinear]:
    decoder = runner._computation.decoder
    assert isinstance(decoder, TransformersDecoder)
    return {name: each for name, each in decoder.backbone.named_modules() if isinstance(each, ReplacedLinear)}


def experts_of(runner: ModelRunner) -> list[ReplacedExperts]:
    decoder = runner._computation.decoder
    assert isinstance(decoder, TransformersDecoder)
    return [each for each in decoder.backbone.modules() if isinstance(each, ReplacedExperts)]


def has_weights(experts: ReplacedExperts) -> bool:
    return experts._stored is not None


def check(folder: Path, kind: str, config: PreTrainedConfig, **options: Any) -> ModelRunner:
    checkpoint = write_coded_checkpoint(folder, kind, config)
    samples = [Sample.of(checkpoint, length) for length in (5, 21)]
    runner = load(checkpoint.folder, cpu_activations="keep", **options)
    run(runner, samples, [sample.work(chunk=7) for sample in samples])
    runner.close()
    return runner


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_are_those_of_what_the_codes_mean(tmp_path: Path, kind: str) -> None:
    layers = layers_of(check(tmp_path, kind, CONFIG))
    assert len(layers) == 6 * CONFIG.num_hidden_layers
    assert not any(hasattr(layer, "weight") for layer in layers.values()), "some are not packed"


@pytest.mark.parametrize("kind", ["awq", "gptq-8", "nf4", "mxfp4"])
def test_torch_multiplies_floats(tmp_path: Path, kind: str) -> None:
    layers = layers_of(check(tmp_path, kind, CONFIG, cpu_compile="false"))
    assert all(isinstance(layer.stored, DenseWeight) for layer in layers.values())


@pytest.mark.parametrize("kind", ["awq", "gptq-4-reordered", "gptq-8", "int4", "int8", "fp8-official", "nf4", "mxfp4"])
def test_experts_stay_codes(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    experts = experts_of(check(tmp_path, kind, EXPERTS))
    assert len(experts) == EXPERTS.num_hidden_layers - EXPERTS.num_dense_layers
    assert not any(has_weights(each) for each in experts), "some are not packed"
    assert f"the experts of {len(experts)} layers run in C++" in caplog.text
    assert "become floats" not in caplog.text


@pytest.mark.parametrize("kind", ["awq", "gptq-8"])
def test_torch_computes_experts_of_floats(tmp_path: Path, kind: str) -> None:
    experts = experts_of(check(tmp_path, kind, EXPERTS, cpu_compile="false"))
    assert experts
    assert all(isinstance(each.stored.gate_up_ECD, torch.Tensor) for each in experts)


def test_experts_of_which_some_are_floats_become_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_coded_checkpoint(tmp_path, "fp8-whole", EXPERTS)
    name = "model.layers.1.mlp.experts.2.up_proj"
    meant = load_file(tmp_path / "dense" / "model.safetensors")[f"{name}.weight"]
    gone = {f"{name}.weight_scale": None, f"{name}.input_scale": None}
    change_tensors(checkpoint.folder, **{f"{name}.weight": meant, **gone})
    sample = Sample.of(checkpoint, 21)
    runner = load(checkpoint.folder, cpu_activations="keep")
    run(runner, [sample], [sample.work(chunk=7)])
    runner.close()
    num_weights = 3 * EXPERTS.num_experts - 1
    assert f"{num_weights} quantised weights become floats" in caplog.text
    assert len(experts_of(runner)) == EXPERTS.num_hidden_layers - EXPERTS.num_dense_layers


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("config", NATIVE_TOO)
def test_weights_become_the_codes_that_native_layers_make_of_them(
    tmp_path: Path, config: PreTrainedConfig, quantization: str
) -> None:
    write_checkpoint(tmp_path, config, 1)
    of_both = []
    for model_impl in ("native", "transformers"):
        work = Work(prompt=make_prompt(21), max_tokens=NUM_TOKENS, log_probs=True)
        runner = load(tmp_path, model_impl=model_impl, quantization=quantization)
        Driver(runner).run([work])
        runner.close()
        of_both.append(work)
    native, other = of_both
    assert native.output == other.output
    torch.testing.assert_close(native.output_log_probs, other.output_log_probs, rtol=1e-3, atol=1e-3)
    dense = Work(prompt=make_prompt(21), max_tokens=NUM_TOKENS, log_probs=True)
    runner = load(tmp_path, model_impl="transformers")
    Driver(runner).run([dense])
    runner.close()
    assert dense.output_log_probs != other.output_log_probs, "nothing was quantised"


def test_codes_of_another_shape_are_refused(tmp_path: Path) -> None:
    checkpoint = write_coded_checkpoint(tmp_path, "int4", CONFIG)
    name = "model.layers.1.mlp.down_proj.weight_scale"
    change_tensors(checkpoint.folder, **{name: torch.ones(128, 5)})
    assert refusal(checkpoint.folder).endswith(f"tensor {name} has shape [128, 5], config.json asks for [128, 6]")


def test_formats_without_layers_of_codes_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, 1)
    write_quantization(tmp_path, {"quant_method": "mxfp4"})
    assert refusal(tmp_path).startswith(
        "quantized checkpoints (mxfp4) are not supported with transformers' modelling code"
    )
    write_quantization(tmp_path, {"quant_method": "hqq"})
    assert refusal(tmp_path).startswith("quantized checkpoints (hqq) are not supported")
