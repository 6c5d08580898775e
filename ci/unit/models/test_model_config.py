"""config.json in its old and new spellings, and what must be refused because it would be computed wrongly in silence.

Run: pytest ci/unit/models/test_model_config.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import CONFIGS, architecture_of
from transformers.models.lfm2_moe import modeling_lfm2_moe

import inflight_kernels
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.layers.rotary import RopeConfig, cos_sin_table
from inflight.models.config import Heads, ModelConfig
from inflight.models.config_file import NotNative
from inflight.models.families import FAMILIES
from inflight.models.mixer_tensors import MambaTensors
from inflight.runtime import loading
from inflight.runtime.model_runner import ModelRunner


def write(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """config.json of CONFIGS[name], changed; a value of None takes the key out."""
    values = CONFIGS[name].to_dict()
    values["architectures"] = [architecture_of(name)]
    values.update(changes)
    (folder / "config.json").write_text(json.dumps({key: v for key, v in values.items() if v is not None}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.load(folder)
    return str(caught.value).removeprefix(f"{folder / 'config.json'}")


def test_sizes(tmp_path: Path) -> None:
    config = ModelConfig.load(write(tmp_path, "qwen3", dtype="bfloat16"))
    assert (config.num_heads, config.hidden_size) == (4, 48)
    assert set(config.heads) == {Heads(num_kv_heads=2, head_dim=16, rotary_dim=16)}
    assert config.dtype == torch.bfloat16
    assert not config.tie_word_embeddings


def test_rotated_elements_of_a_head(tmp_path: Path) -> None:
    """As MiniMax-M2's published code reads them, where transformers reads the factor alone."""
    whole = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert ModelConfig.load(write(tmp_path, "minimax-m2")).heads[0].rotary_dim == 8
    assert ModelConfig.load(write(tmp_path, "minimax-m2", **whole)).heads[0].rotary_dim == 16
    assert ModelConfig.load(write(tmp_path, "minimax-m2", **whole, rotary_dim=4)).heads[0].rotary_dim == 4
    assert refusal(write(tmp_path, "minimax-m2", rotary_dim=18)) == (
        ": rotary_dim must be an even number from 4 to 16, got 18"
    )


def test_limits_of_time(tmp_path: Path) -> None:
    (mamba,) = ModelConfig.load(write(tmp_path, "bamba", time_step_limit=[0.1, 0.5])).family.mixers
    assert isinstance(mamba, MambaTensors) and mamba.time_limits == (0.1, 0.5)
    assert refusal(write(tmp_path, "bamba", time_step_limit=[0.5, 0.1])) == (
        ": time_step_limit must be two numbers from 0, the larger one last, got [0.5, 0.1]"
    )


def test_sums_of_scores_that_are_nearly_zero(tmp_path: Path) -> None:
    """LFM2 adds more to them than others do."""
    router = modeling_lfm2_moe.Lfm2MoeTopKRouter(CONFIGS["lfm2-moe"])
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)) - 16
    with torch.inference_mode():
        router.weight.copy_(torch.eye(6, 48))
        _, expected, _ = router(torch.nn.functional.pad(logits, (0, 42)), torch.zeros(6))
    experts = ModelConfig.load(write(tmp_path, "lfm2-moe")).family.experts
    assert experts is not None
    weights, _ = inflight_kernels.route_experts(logits, experts.routing)
    torch.testing.assert_close(weights, expected)
    assert weights.sum(-1).max() < 0.9


def test_head_dim_follows_from_hidden_size(tmp_path: Path) -> None:
    assert ModelConfig.load(write(tmp_path, "qwen2", head_dim=None)).heads[0].head_dim == 12


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_the_type(tmp_path: Path, key: str) -> None:
    folder = write(tmp_path, **{"dtype": None, "torch_dtype": None, key: "float16"})
    assert ModelConfig.load(folder).dtype == torch.float16


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_old_spelling_of_rotary_scaling(tmp_path: Path, type_key: str) -> None:
    scaling = {type_key: "linear", "factor": 4.0}
    config = ModelConfig.load(write(tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling))
    [rope] = set(config.ropes)
    assert rope is not None and (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 500.0)


def test_old_spelling_without_scaling(tmp_path: Path) -> None:
    [rope] = set(ModelConfig.load(write(tmp_path, rope_parameters=None, rope_theta=777.0)).ropes)
    assert rope is not None and (rope.kind, rope.theta) == ("default", 777.0)


def test_positions_stretch_with_the_scaling(tmp_path: Path) -> None:
    plain = ModelConfig.load(write(tmp_path))
    assert plain.max_positions == plain.max_position_embeddings == 128
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    stretched = ModelConfig.load(write(tmp_path, rope_parameters=yarn))
    assert (stretched.max_position_embeddings, stretched.max_positions) == (128, 512)


def test_windows_per_layer(tmp_path: Path) -> None:
    assert ModelConfig.load(write(tmp_path, "mistral-window")).sliding_windows == (11, 11, 11)
    assert ModelConfig.load(write(tmp_path, "qwen2-window", layer_types=None)).sliding_windows == (0, 9, 9)
    assert ModelConfig.load(write(tmp_path, "qwen3-window")).sliding_windows == (13, 0, 13)
    # Qwen2's sliding_window means nothing unless use_sliding_window says so.
    assert ModelConfig.load(write(tmp_path, "qwen2", sliding_window=9)).sliding_windows == (0, 0, 0)


def test_a_part_of_each_head_is_rotated(tmp_path: Path) -> None:
    config = ModelConfig.load(write(tmp_path, "phi3-partial-window"))
    assert (config.heads[0].head_dim, config.heads[0].rotary_dim) == (12, 6)
    assert ModelConfig.load(write(tmp_path, "phi3")).heads[0].rotary_dim == 12


@pytest.mark.parametrize("factor", [0.1, 0.6, 1.5])
def test_a_part_of_a_head_that_cannot_be_rotated(tmp_path: Path, factor: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    sentence = refusal(write(tmp_path, "phi3", rope_parameters=rope))
    assert f"partial_rotary_factor {factor} must leave an even number, from 4 to 12" in sentence


def test_longrope_is_left_to_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}
    with pytest.raises(NotNative, match="rope type 'longrope' is not supported"):
        ModelConfig.load(write(tmp_path, "phi3", rope_parameters=rope))


def test_factors_of_the_checkpoint(tmp_path: Path) -> None:
    family = ModelConfig.load(write(tmp_path, "granite")).family
    assert (family.attention.scale, family.embedding_multiplier, family.residual_multiplier) == (0.15, 3.0, 0.6)
    assert family.logits_multiplier == 1 / 1.7


@pytest.mark.parametrize("key", ["attention_multiplier", "embedding_multiplier", "residual_multiplier"])
def test_a_factor_out_of_range(tmp_path: Path, key: str) -> None:
    sentence = refusal(write(tmp_path, "granite", **{key: -1.0}))
    assert sentence == f": {key} must be a number from 1e-06 to 1000000000, got -1.0"


def test_layers_with_experts_beside_shared_ones(tmp_path: Path) -> None:
    for name, layers, size in (("qwen2-moe", {0, 2}, 36), ("qwen2-moe-window", {1}, 36), ("glm4-moe", {1, 2}, 40)):
        experts = ModelConfig.load(write(tmp_path, name)).family.experts
        assert experts is not None and experts.layers == layers
        assert experts.shared is not None and experts.shared.intermediate_size == size


def test_layers_with_experts(tmp_path: Path) -> None:
    for name, layers in (("qwen3-moe", {0, 2}), ("qwen3-moe-shares", {1}), ("mixtral-window", {0, 1, 2})):
        experts = ModelConfig.load(write(tmp_path, name)).family.experts
        assert experts is not None and experts.layers == layers
        assert experts.routing.renormalize == (name != "qwen3-moe-shares")
        assert experts.intermediate_size == (80 if name == "mixtral-window" else 20)
    assert ModelConfig.load(write(tmp_path, "qwen3")).family.experts is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok (7) must be at most the number of experts (6)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a whole number from 1 to 2147483647, got 0"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of whole numbers, got [-1]"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1 to 2147483647, got 0"),
    ],
)
def test_experts_that_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    assert refusal(write(tmp_path, "qwen3-moe", **changes)) == f": {sentence}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_group": 3}, "8 experts do not make 3 equal groups"),
        ({"n_group": 2, "topk_group": 3}, "3 of 2 groups of experts cannot be chosen"),
        ({"n_group": 4}, "1 groups of 2 experts have fewer than 3"),
    ],
)
def test_groups_of_experts_that_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    assert refusal(write(tmp_path, "glm4-moe", **changes)) == f": {sentence}"


def test_more_experts_than_a_kernel_takes_are_for_transformers(tmp_path: Path) -> None:
    with pytest.raises(NotNative, match="33 of 64 experts for each token are not supported; 32 of 2048 are"):
        ModelConfig.load(write(tmp_path, "qwen3-moe", num_local_experts=64, num_experts_per_tok=33))


def test_unknown_architecture_is_told_the_known_ones(tmp_path: Path) -> None:
    sentence = refusal(write(tmp_path, architectures=["MambaForCausalLM"]))
    assert "has no layers of its own for MambaForCausalLM" in sentence
    assert all(name in sentence for name in FAMILIES)


def test_no_architecture(tmp_path: Path) -> None:
    assert "names no architecture, such as LlamaForCausalLM" in refusal(write(tmp_path, architectures=None))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("hidden_act 'mish' is not supported", {"hidden_act": "mish"}),
    ("hidden_act '' is not the name of an activation", {"hidden_act": ""}),
    ("quantized checkpoints (aqlm) are not supported", {"quantization_config": {"quant_method": "aqlm"}}),
    (
        "rope type 'longrope' is not supported; these are: default, linear, proportional, dynamic, llama3, yarn",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 6,
                "long_factor": [1.0] * 6,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    (
        "partial_rotary_factor other than 1 is not supported",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    ("dtype float64 is not supported", {"dtype": "float64"}),
]


@pytest.mark.parametrize(("words", "changes"), REFUSED, ids=[words.split(" is")[0] for words, _ in REFUSED])
def test_refused(tmp_path: Path, words: str, changes: dict[str, Any]) -> None:
    assert words in refusal(write(tmp_path, **changes))


def test_values_that_transformers_refuses_are_one_sentence(tmp_path: Path) -> None:
    sentence = refusal(write(tmp_path, "qwen2", layer_types=["full_attention", "diagonal", "full_attention"]))
    assert "\n" not in sentence
    assert "`layer_types` entries must be in" in sentence


def test_a_checkpoints_own_code_is_never_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (tmp_path / "code.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    ModelConfig.load(write(tmp_path, auto_map={"AutoConfig": "code.Config"}))
    assert not witness.exists()


def test_an_unknown_model_type_with_its_own_code_is_refused(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (tmp_path / "code.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    refusal(write(tmp_path, model_type="mine", auto_map={"AutoConfig": "code.Config"}))
    assert not witness.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_seq_len": 129}, "max_seq_len 129 is more than the 128 positions that the checkpoint has"),
        ({"max_seq_len": 1}, "max_seq_len must be at least 2 (one prompt token and one new), got 1"),
    ],
)
def test_max_seq_len(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelRunner.load(EngineConfig(gpt_model_path=str(write(tmp_path)), device="cpu", **options), SingleRank())
    assert str(caught.value) == sentence


def test_positions_whose_table_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda device, num_ranks: 2**30)
    folder = write(tmp_path, max_position_embeddings=2**31 - 1)
    with pytest.raises(ConfigurationError) as caught:
        ModelRunner.load(EngineConfig(gpt_model_path=str(folder), device="cpu"), SingleRank())
    assert str(caught.value) == (
        "max_seq_len 2147483647 takes 288.00 GiB of memory to make the table of its positions for heads of 12, "
        "but 1.00 GiB are free; set max_seq_len to less"
    )


def test_dynamic_scaling_leaves_the_original_positions_alone() -> None:
    plain = RopeConfig(original_max_positions=16)
    dynamic = RopeConfig(kind="dynamic", factor=2.0, original_max_positions=16)
    tables = cos_sin_table(plain, 8, 24), cos_sin_table(dynamic, 8, 24)
    assert torch.equal(tables[0][:16], tables[1][:16])
    assert not torch.allclose(tables[0][16:], tables[1][16:])


def test_a_position_is_turned_alike_in_tables_of_any_length() -> None:
    for kind in ("default", "linear", "dynamic", "llama3", "yarn"):
        rope = RopeConfig(kind=kind, factor=2.0, original_max_positions=16)
        assert torch.equal(cos_sin_table(rope, 8, 20), cos_sin_table(rope, 8, 64)[:20])


def test_layers_of_gemma_4_have_heads_windows_and_keys_of_their_own(tmp_path: Path) -> None:
    config = ModelConfig.load(write(tmp_path, "gemma4"))
    local = Heads(num_kv_heads=2, head_dim=16, rotary_dim=16)
    full = Heads(num_kv_heads=2, head_dim=24, rotary_dim=24)
    assert config.heads == (local, full, local, full, full)
    assert config.sliding_windows == (11, 0, 11, 0, 0)
    assert config.family.key_layers == (0, 1, 0, 1, 1)
    assert config.family.mlp.double_layers == {2, 3, 4}
    alone = ModelConfig.load(write(tmp_path, "gemma4-experts"))
    assert alone.heads[1] == Heads(num_kv_heads=1, head_dim=24, rotary_dim=24)
    assert alone.family.layers_without_values == {1, 3, 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention 'all' is not supported; only null, 'vision'",
        ),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers (5) must be less than num_hidden_layers (5)"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, but no earlier layer has keys for those of full_att"),
        ({"vocab_size_per_layer_input": 202}, "vocab_size_per_layer_input (202) must be at least vocab_size (203)"),
        (
            {"per_layer_config": {"2": {"head_dim": 32}}},
            "attends to the keys of layer 0, and has other heads by per_layer_config",
        ),
        (
            {"per_layer_config": {"1": {"intermediate_size": 32}}},
            "per_layer_config has intermediate_size, which no layer may have of its own",
        ),
    ],
)
def test_what_gemma_4_cannot_have(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(write(tmp_path, "gemma4", **changes))


def test_heads_of_single_layers_are_of_families_that_have_them(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", per_layer_config={"1": {"head_dim": 32}})
    assert "per_layer_config is not supported for this architecture" in refusal(folder)
