"""Networks of GGUF files: the tensors, tokens and logits of the checkpoint that they were written of, as codes or as
floats; in C++ and in torch. What ranks hold: test_gguf_ranks.py.

Run: pytest ci/unit/models/test_gguf_weights.py
"""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_network import force, needs_compiler
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf_files import BF16, F16, F32, K_QUANTS, Q4_0, Q8_0, GgufModel, write_model
from gguf_networks import CONFIGS
from numpy.typing import NDArray
from quantized_runs import distance, run
from safetensors.torch import load_file
from tiny_checkpoints import make_prompt

from inflight.errors import ConfigurationError
from inflight.gguf.file import GgufFile
from inflight.gguf.folder import make_folder
from inflight.gguf.tensor_types import F16 as F16_TYPE
from inflight.gguf.tensor_types import TensorType
from inflight.models.ggml_codes import CODES, common_coding
from inflight.models.gguf_checkpoint import GgufCheckpoint, open_checkpoint
from inflight.models.split_tensors import SplitByOutputs
from inflight_kernels.cpu import variants_here
from inflight_kernels.matmul.coded_weight import CodedWeight, join_halves

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PROMPTS = [make_prompt(length) for length in (1, 8, 21)]
OTHER_CODES = [GGMLQuantizationType[name] for name in ("Q4_1", "Q5_0", "Q5_1", "MXFP4")]
SAME = 1e-4
"""Bound of log probabilities against transformers' network of the numbers that codes stand for, all in float32."""
LAYER = "model.layers.0"
QKV = SplitByOutputs(tuple(f"self_attn.{name}_proj" for name in "qkv"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.gguf.folder.cache_folder", lambda name: tmp_path_factory.mktemp(name))


def assert_equal_results(model: GgufModel, **options: Any) -> None:
    found, expected = (
        run(folder, PROMPTS, dtype="float32", **options) for folder in (make_folder(model.file), model.dense.folder)
    )
    assert [work.output for work in found] == [work.output for work in expected]
    assert len({tuple(work.output) for work in found}) == len(PROMPTS)
    for work, of_dense in zip(found, expected, strict=True):
        np.testing.assert_allclose(work.output_log_probs, of_dense.output_log_probs, atol=2e-5)
        assert distance(work, model.dense.model) < SAME


def told_dense(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "made dense" in record.message]


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logits_are_those_of_the_checkpoint_it_was_written_of(name: str, tmp_path: Path) -> None:
    assert_equal_results(write_model(tmp_path, name, F32))


@pytest.mark.parametrize("kind", [F16, Q8_0, Q4_0, GGMLQuantizationType.Q5_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "phi3", "qwen3-moe"])
def test_quantised_networks_are_those_of_the_numbers_that_the_codes_stand_for(
    name: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    assert_equal_results(write_model(tmp_path, name, kind))


@needs_compiler
@pytest.mark.parametrize("kind", [Q8_0, Q4_0, *OTHER_CODES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "qwen3-moe"])
def test_compiled_layers_multiply_the_codes(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    assert_equal_results(write_model(tmp_path, name, kind), cpu_compile="true")


@needs_compiler
@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-256", "mixtral"])
def test_so_they_multiply_those_of_k_quants(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    assert_equal_results(write_model(tmp_path, name, kind), cpu_compile="true")


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        *("gemma3", "gemma4", "gemma4-experts", "gpt-oss", "glm4-moe", "granite-moe", "qwen2-moe", "cohere2"),
        *("qwen3_5", "qwen3-next", "deepseek-v3", "lfm2-moe", "granite-hybrid-moe", "nemotron-3", "falcon-h1"),
        *("bamba", "kimi-linear", "gpt2", "glm"),
    ],
)
def test_so_they_multiply_those_of_networks_with_more_parts(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Types as in published files: experts of gpt-oss, and of others, are `MXFP4`."""

    def type_of(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType.MXFP4 if ".experts." in name else Q8_0

    with caplog.at_level(logging.INFO):
        assert_equal_results(write_model(tmp_path, name, type_of), cpu_compile="true")
    assert not told_dense(caplog)


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_gates_and_ups_in_one_tensor_are_halves_of_it(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, kind, fuses_experts=True)
    assert "blk.0.ffn_gate_up_exps.weight" in GgufFile(model.file).tensors
    assert_equal_results(model)


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=lambda kind: kind.name)
def test_queries_keys_and_values_in_one_tensor_are_rows_of_it(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """As files of ChatGLM's own checkpoints have them."""

    def join(writer: GGUFWriter) -> None:
        tensors = writer.tensors[0]
        for layer, ending in itertools.product(range(3), ("weight", "bias")):
            parts = [tensors.pop(f"blk.{layer}.attn_{name}.{ending}") for name in "qkv"]
            rows = np.concatenate([part.tensor for part in parts if part.tensor is not None])
            writer.add_tensor(f"blk.{layer}.attn_qkv.{ending}", rows, raw_dtype=parts[0].dtype)

    assert_equal_results(write_model(tmp_path, "glm", kind, join))


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    def with_another_layer(writer: GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_uint32("glm4moe.nextn_predict_layers", 1)
        writer.add_tensor("blk.3.nextn.enorm.weight", np.ones(64, np.float32))
        writer.add_tensor("blk.3.attn_norm.weight", np.ones(64, np.float32))

    assert_equal_results(write_model(tmp_path, "glm4-moe", F32, with_another_layer))


def test_keys_of_layers_that_use_those_of_others_are_not_read(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 have them, and so have files."""

    def with_keys(writer: GGUFWriter) -> None:
        for name, shape in (("attn_k", (128, 64)), ("attn_v", (128, 64)), ("attn_k_norm", (64,))):
            writer.add_tensor(f"blk.4.{name}.weight", np.ones(shape, np.float32))

    assert_equal_results(write_model(tmp_path, "gemma4", F32, with_keys))


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "sentence"),
    [
        ("qwen3_5", "blk.0.ssm_a", None, "the checkpoint has no tensor model.layers.0.linear_attn.A_log"),
        (
            "qwen3_5",
            "blk.0.ssm_norm.weight",
            (31,),
            "linear_attn.norm.weight has shape [31], config.json asks for [32]",
        ),
        ("qwen3_5", "blk.0.ssm_dt.bias", (5,), "the 5 rows of blk.0.ssm_dt.bias are not the 6 that its metadata say"),
        ("granite-hybrid", "blk.0.ssm_d", (3, 1), "model.layers.0.mamba.D has shape [3], config.json asks for [4]"),
        ("granite-hybrid", "blk.2.ssm_conv1d.bias", None, "has no tensor model.layers.2.mamba.conv1d.bias"),
        (
            "nemotron-h",
            "blk.0.ssm_conv1d.weight",
            (191, 4),
            "conv1d.weight has shape [191, 1, 4], config.json asks for",
        ),
        ("nemotron-h", "blk.3.ssm_dt.bias", None, "has no tensor backbone.layers.3.mixer.dt_bias"),
        ("falcon-h1", "blk.1.ssm_a", (5, 1), "model.layers.1.mamba.A_log has shape [5], config.json asks for [4]"),
        ("kimi-linear", "blk.0.ssm_a", (1, 1, 5, 1), "self_attn.A_log has shape [1, 1, 5, 1], config.json asks for"),
        ("kimi-linear", "blk.2.ssm_conv1d_k.weight", (1, 127, 1, 4), "k_conv1d.weight has shape [127, 1, 4], config"),
        ("gpt2", "position_embd.weight", (127, 64), "transformer.wpe.weight has shape [127, 64], config.json asks for"),
        (
            "gpt2",
            "blk.1.attn_qkv.weight",
            (64, 192),
            "attn.c_attn.weight has shape [64, 192], config.json asks for [19",
        ),
        ("lfm2", "blk.0.shortconv.conv.weight", (63, 3), "conv.conv.weight has shape [63, 1, 3], config.json asks for"),
        ("lfm2", "blk.2.shortconv.in_proj.weight", None, "has no tensor model.layers.2.conv.in_proj.weight"),
        ("gemma4", "blk.0.layer_output_scale.weight", None, "has no tensor model.layers.0.layer_scalar"),
        ("gemma4", "per_layer_model_proj.weight", (9, 64), "per_layer_model_projection.weight has shape [9, 64]"),
    ],
)
def test_tensors_that_are_missing_or_have_other_shapes_are_named(
    name: str, tensor: str, shape: tuple[int, ...] | None, sentence: str, tmp_path: Path
) -> None:
    def damage(writer: GGUFWriter) -> None:
        writer.tensors[0].pop(tensor)
        if shape is not None:
            writer.add_tensor(tensor, np.ones(shape, np.float32))

    model = write_model(tmp_path, name, F32, damage)
    with pytest.raises(ConfigurationError, match=re.escape(sentence)) as caught:
        run(make_folder(model.file), PROMPTS[:1], dtype="float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron-h", "lfm2", "gemma4"])
def test_a_file_that_ends_early_is_refused(name: str, tmp_path: Path) -> None:
    file = write_model(tmp_path, name, F32).file
    whole = file.read_bytes()
    for length in (len(whole) - 4, len(whole) // 2, 100):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match="download it again"):
            make_folder(file)


def test_the_gate_of_a_shared_expert_may_be_a_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's quantize writes it."""
    add = GGUFWriter.add_tensor

    def flattened(writer: GGUFWriter, name: str, tensor: NDArray[Any], **options: Any) -> None:
        add(writer, name, tensor[0] if "inp_shexp" in name else tensor, **options)

    monkeypatch.setattr(GGUFWriter, "add_tensor", flattened)
    assert_equal_results(write_model(tmp_path, "qwen2-moe", F32))


@needs_compiler
def test_experts_with_tensors_of_their_own_have_codes_in_common(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in files of 2023; the types are those of Q4_K_M, and of one expert others."""

    def type_of(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType.Q6_K if ".w2." in name or ".experts.1." in name else GGMLQuantizationType.Q4_K

    with caplog.at_level(logging.INFO):
        assert_equal_results(write_model(tmp_path, "mixtral", type_of, stacks_experts=False), cpu_compile="true")
    assert not told_dense(caplog)


@needs_compiler
@pytest.mark.parametrize("activations", ["keep", "int8"])
@pytest.mark.parametrize("name", ["llama-256", "mixtral"])
def test_codes_in_groups_of_16_give_the_same_bits_by_every_variant_alone_and_beside_others(
    name: str, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {
        "down_proj": GGMLQuantizationType.Q2_K,
        "w2": GGMLQuantizationType.Q2_K,
        "o_proj": GGMLQuantizationType.Q3_K,
    }

    def type_of(name: str) -> GGMLQuantizationType:
        return others.get(name.split(".")[-2], GGMLQuantizationType.Q6_K)

    folder = make_folder(write_model(tmp_path, name, type_of).file)
    options = {"cpu_compile": "true", "dtype": "bfloat16", "cpu_order": "fma", "cpu_activations": activations}
    expected = None
    for variant in variants_here():
        force(monkeypatch, variant=variant)
        together = run(folder, PROMPTS, **options)
        alone = [run(folder, [prompt], **options)[0] for prompt in PROMPTS]
        for works in (together, alone):
            found = [(work.output, work.output_log_probs) for work in works]
            expected = expected or found
            assert found == expected


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0, Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-moe"])
def test_each_tensor_is_what_gguf_dequantises(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, kind)
    expected = load_file(model.dense.folder / "model.safetensors")
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        assert set(checkpoint.names) == set(expected)
        for tensor_name, values in expected.items():
            found = torch.empty_like(values)
            checkpoint.copy_into(found, tensor_name, tuple(values.shape))
            assert torch.equal(found, values)
            # A part, in the middle.
            starts = tuple(size // 4 for size in values.shape)
            part = torch.empty([size // 2 for size in values.shape])
            checkpoint.copy_into(part, tensor_name, tuple(values.shape), starts)
            index = tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))
            assert torch.equal(part, values[index])


def test_parts_are_read_as_one_file(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama", Q8_0, tensors_of_part=9)
    expected = load_file(model.dense.folder / "model.safetensors")
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        assert set(checkpoint.names) == set(expected)
        for name, values in expected.items():
            found = torch.empty_like(values)
            checkpoint.copy_into(found, name, tuple(values.shape))
            assert torch.equal(found, values)


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.name)
def test_codes_mean_what_gguf_dequantises(kind: TensorType) -> None:
    """Of blocks of any bytes, with numbers in the places of their float16s; some scales are 0."""
    rng, count = np.random.default_rng(1), 64
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 140, count)
    else:
        scales = np.where(np.arange(count) % 7 == 0, 0.0, rng.normal(scale=0.02, size=(2, count))).astype(np.float16)
        places = K_QUANTS.get(GGMLQuantizationType[kind.name], ((0, 1.0), (2, 1.0)))
        units = places if CODES[kind].coding.has_zeros else places[:1]
        for (place, _), of_blocks in zip(units, scales, strict=False):
            blocks[:, place : place + 2] = of_blocks[:, None].view(np.uint8)
    expected = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind.name]))
    decoded, coding = CODES[kind].decode(blocks), CODES[kind].coding
    codes, of_group = torch.from_numpy(np.ascontiguousarray(decoded.codes)), torch.from_numpy(decoded.scales)
    weight = CodedWeight(
        coding.code,
        codes if coding.code.bits == 8 else join_halves(codes),
        of_group.to(coding.scale_dtype),
        None if decoded.zeros is None else torch.from_numpy(decoded.zeros),
        coding.group_size,
    )
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-5, atol=1e-6)


def test_large_matrices_are_made_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path, "llama", Q8_0)
    name, shape = "lm_head.weight", (203, 64)
    monkeypatch.setattr("inflight.models.gguf_checkpoint.DENSE_BYTES", 7 * 64 * 4)
    found = torch.zeros(210, 64)
    with open_checkpoint(make_folder(model.file)) as checkpoint:
        checkpoint.copy_into(found, name, shape)
    assert torch.equal(found[:203], load_file(model.dense.folder / "model.safetensors")[name])
    assert not found[203:].any()


@needs_compiler
@pytest.mark.parametrize("kinds", ["Q2_K Q4_K", "Q3_K Q5_K", "Q4_K Q6_K", "Q4_0 Q8_0"])
def test_layers_of_several_types_in_one_product_have_codes_in_common(
    kinds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in files that keep values more exactly than queries and keys."""
    more, less = (GGMLQuantizationType[name] for name in reversed(kinds.split()))
    model = write_model(tmp_path, "llama-256", lambda name: more if "v_proj" in name else less)
    with caplog.at_level(logging.INFO):
        assert_equal_results(model, cpu_compile="true")
    assert not told_dense(caplog)


def test_numbers_that_are_not_whole_have_no_codes_in_common_with_others() -> None:
    kinds = {kind.name: kind for kind in CODES}
    assert common_coding([kinds["MXFP4"], kinds["MXFP4"]]) == CODES[kinds["MXFP4"]].coding
    assert common_coding([kinds["MXFP4"], kinds["Q8_0"]]) is None
    assert common_coding([kinds["Q8_0"], F16_TYPE]) is None


def test_stacked_layers_of_several_types_are_dense_in_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in files that keep values more exactly than queries and keys."""
    more_exact = GGMLQuantizationType.Q5_1
    model = write_model(
        tmp_path, "llama", lambda name: Q8_0 if "v_proj" in name else more_exact if "o_p" in name else Q4_0
    )
    with caplog.at_level(logging.INFO):
        assert_equal_results(model)
    assert told_dense(caplog) == [
        "layers of type Q4_0, Q5_1, Q8_0 were made dense as they were read, and take as much memory as unquantised ones"
    ]
