"""Wrong values in a checkpoint's config.json: one sentence that names the file and the key, never anything else.

pytest ci/unit/models/test_config_file.py
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import CONFIGS, architecture_of

from inflight.errors import ConfigurationError
from inflight.layers.rotary import FREQUENCIES, cos_sin_table
from inflight.models.config import ModelConfig
from inflight.models.config_file import MAX_LAYERS, MAX_SIZE, ROPE_RULES, RULES

SIZES = [key for key, rule in RULES.items() if rule.words.startswith("a whole number from 1")]


def write(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """config.json of CONFIGS[name], changed; null stays in the file."""
    values = {**CONFIGS[name].to_dict(), "architectures": [architecture_of(name)], **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refusal(folder: Path, changes: dict[str, Any]) -> str:
    """What is said about the file, behind its path."""
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.load(write(folder, "llama", changes))
    path, _, sentence = str(caught.value).partition(": ")
    assert path == str(folder / "config.json")
    return sentence


def test_the_sizes_are_these() -> None:
    assert set(SIZES) == {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    }


@pytest.mark.parametrize("value", ["48", True, [48], {}, float("nan"), float("inf"), 48.0, 0, -1, 2**31], ids=repr)
@pytest.mark.parametrize("key", SIZES)
def test_a_size_is_a_whole_number_in_range(tmp_path: Path, key: str, value: object) -> None:
    largest = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
    assert refusal(tmp_path, {key: value}) == f"{key} must be a whole number from 1 to {largest}, got {value!r}"


@pytest.mark.parametrize("key", [key for key in SIZES if not RULES[key].may_be_null])
def test_a_size_is_not_null(tmp_path: Path, key: str) -> None:
    assert f"{key} must be a whole number" in refusal(tmp_path, {key: None})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number from 0 to 1, got nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number from 0 to 1, got '1e-5'"),
        ({"sliding_window": -1}, "sliding_window must be a whole number from 0 to 2147483647, got -1"),
        ({"architectures": 7}, "architectures must be a list of strings, got 7"),
        ({"layer_types": [1]}, "layer_types must be a list of strings, got [1]"),
        ({"mlp_bias": "false"}, "mlp_bias must be true or false, got 'false'"),
        ({"rope_theta": 0}, "rope_theta must be a number above 1 and at most 2147483647, got 0"),
        ({"rope_scaling": [4.0]}, "rope_scaling must be an object, got [4.0]"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "4"}},
            "rope_parameters.factor must be a number from 1e-06 to 1000000000, got '4'",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (4)"),
        ({"head_dim": 13}, "head_dim must be an even number of at least 4, got 13"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be more than low_freq_factor",
        ),
    ],
)
def test_other_values(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    assert refusal(tmp_path, changes) == sentence


def test_a_long_value_is_not_quoted_whole(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, {"vocab_size": ["word"] * 10_000})) < 200


def test_a_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        ModelConfig.load(tmp_path)


def test_the_log_says_which_values_are_transformers_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inflight")
    path = write(tmp_path, "llama", {}) / "config.json"
    ModelConfig.load(tmp_path)
    assert caplog.messages == []
    values = json.loads(path.read_text())
    for key in ("rms_norm_eps", "rope_parameters", "hidden_act", "attention_dropout"):
        values.pop(key, None)
    path.write_text(json.dumps(values))
    config = ModelConfig.load(tmp_path)
    assert (config.family.norms.eps, config.ropes[0] and config.ropes[0].theta) == (1e-6, 10_000.0)
    assert caplog.messages == [
        f"{path} leaves out what transformers' defaults stand for: "
        'rms_norm_eps 1e-06, rope_theta 10000.0, hidden_act "silu"'
    ]


OWN_KEYS = sorted({key for config in CONFIGS.values() for key in config.to_dict()} - RULES.keys())
"""Of any family."""
LIKELY = st.sampled_from([0.1, 0.5, 1, 1.5, 2, 4, 8.0, 32, 64, 1000, 1e6])
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2, 2**16, 2**31 - 1, 2**63, 10**30, 1e-30, 1e30])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROPE = st.builds(
    lambda kind, values: {**kind, **values},
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from(list(FREQUENCIES)), "rope_theta": LIKELY, "factor": LIKELY, "beta_slow": LIKELY}
        | {key: LIKELY for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    ),
    st.dictionaries(st.sampled_from(list(ROPE_RULES)), LIKELY, max_size=5)
    | st.dictionaries(st.sampled_from(list(ROPE_RULES)), NUMBERS | JSON, max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(list(CONFIGS)),
    changes=st.just({}) | st.dictionaries(st.sampled_from([*RULES, *OWN_KEYS]), NUMBERS | JSON, max_size=3),
    rope=st.none() | ROPE,
)
def test_any_values_work_or_are_refused_in_one_line(name: str, changes: dict[str, Any], rope: Any) -> None:
    """What is accepted also has positions to turn by, all of them finite."""
    changes = changes if rope is None else {**changes, "rope_parameters": rope}
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = ModelConfig.load(write(Path(folder), name, changes))
        except ConfigurationError as error:
            assert str(error).startswith(f"{folder}/config.json") and "\n" not in str(error)
            return
    assert min(config.num_layers, config.num_heads, config.max_positions) >= 1
    for rope, heads in set(zip(config.ropes, config.heads, strict=True)):
        assert heads.num_kv_heads >= 1
        if heads.head_dim <= 4096:
            assert torch.isfinite(cos_sin_table(rope, heads.rotary_dim, 8)).all()
