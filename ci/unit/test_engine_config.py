"""EngineConfig: absurd values are one sentence that names the key.

pytest ci/unit/test_engine_config.py
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.config_keys import LARGEST, UNSUPPORTED_KEYS
from inflight.errors import ConfigurationError

KEYS = [field.name for field in fields(EngineConfig)]
WHOLE_NUMBERS = [field.name for field in fields(EngineConfig) if type(field.default) is int]


def test_every_whole_number_has_a_largest_value() -> None:
    assert set(LARGEST) == set(WHOLE_NUMBERS)


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
def test_a_number_beyond_any_use_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_parameters({key: str(10**20)})
    sentence, _, remedy = str(caught.value).partition(": ")
    assert sentence == f"{key} must be at most {LARGEST[key]}, got {10**20}"
    assert remedy or LARGEST[key] > 1


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
def test_the_largest_value_is_allowed(key: str) -> None:
    others = {
        "executor": "mpi",
        "tensor_parallel_size": str(LARGEST["tensor_parallel_size"]),
        "max_num_tokens": str(LARGEST["max_num_tokens"]),
        "lookahead_window_size": "2",
        "lookahead_ngram_size": "2",
        "max_tokens_in_paged_kv_cache": "4096",
        "data_parallel_size": "256",
        "max_tokens_in_buffer": "65536",
    }
    assert getattr(EngineConfig.from_parameters({**others, key: str(LARGEST[key])}), key) == LARGEST[key]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"max_tokens_in_paged_kv_cache": 4096, "kv_cache_free_gpu_mem_fraction": 0.5},
        {"max_tokens_in_paged_kv_cache": 4096, "lora_cache_gpu_memory_fraction": 0.5},
    ],
)
def test_spare_ranks_need_sizes_that_are_the_same_whenever_they_load(sizes: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="set max_tokens_in_paged_kv_cache, and leave"):
        EngineConfig(spare_ranks=1, **sizes)  # type: ignore[arg-type]


def test_a_draft_model_is_looked_for_in_the_version_folder() -> None:
    config = EngineConfig.from_parameters({"speculative_model_dir": "draft"}, "llm/1")
    assert config.speculative_model_dir == "llm/1/draft" and config.speculative_decoding.draft_target.max_draft_len == 4
    assert EngineConfig.from_parameters({}, "llm/1").speculative_decoding.draft_target.max_draft_len == 0


@given(st.dictionaries(st.sampled_from(KEYS), st.text() | st.integers().map(str) | st.floats().map(str), max_size=4))
def test_any_values_work_or_are_refused_in_one_line(parameters: dict[str, str]) -> None:
    try:
        EngineConfig.from_parameters(parameters)
    except ConfigurationError as error:
        assert "\n" not in str(error)


def test_a_kv_cache_is_of_the_activations_type_or_has_8_bits() -> None:
    assert (
        EngineConfig().kv_cache_dtype == EngineConfig.from_parameters({"kv_cache_dtype": ""}).kv_cache_dtype == "auto"
    )
    for each in ("fp8", "int8"):
        assert EngineConfig.from_parameters({"kv_cache_dtype": each}).kv_cache_dtype == each
    with pytest.raises(ConfigurationError, match="kv_cache_dtype must be one of auto, fp8, int8, got 'int4'"):
        EngineConfig.from_parameters({"kv_cache_dtype": "int4"})
    with pytest.raises(ConfigurationError, match="kv_cache_dtype int8 needs tokens_per_block to be at least 4, or 0"):
        EngineConfig.from_parameters({"kv_cache_dtype": "int8", "tokens_per_block": "2"})


def test_sizes_of_lookahead_decoding_belong_together() -> None:
    assert EngineConfig().speculative_decoding.lookahead.is_off
    sizes = {"lookahead_window_size": "4", "lookahead_ngram_size": "3", "lookahead_verification_set_size": "4"}
    assert not EngineConfig.from_parameters(sizes).speculative_decoding.lookahead.is_off
    for key in sizes:
        if key != "lookahead_verification_set_size":
            with pytest.raises(ConfigurationError, match="set all of them or none"):
                EngineConfig.from_parameters({**sizes, key: ""})
    with pytest.raises(ConfigurationError, match="lookahead_ngram_size 1 means no lookahead decoding"):
        EngineConfig.from_parameters({**sizes, "lookahead_ngram_size": "1"})


def test_each_replica_gets_its_part_of_the_devices_and_shares_the_machine() -> None:
    config = EngineConfig(tensor_parallel_size=2, data_parallel_size=2, gpu_device_ids="4,5,0,1")
    assert (config.num_replica_ranks, config.num_ranks, config.launcher) == (2, 4, "mpi")
    assert [config.of_replica(replica).gpu_device_ids for replica in (0, 1)] == ["4,5", "0,1"]
    assert config.of_replica(1).num_ranks == 4
    unset = EngineConfig(tensor_parallel_size=2, data_parallel_size=2)
    assert [unset.of_replica(replica).gpu_device_ids for replica in (0, 1)] == ["0,1", "2,3"]
    assert EngineConfig(tensor_parallel_size=2).of_replica(0) == EngineConfig(tensor_parallel_size=2)
    with pytest.raises(
        ConfigurationError, match="gpu_device_ids must be one number for each of the 4 ranks, got '4,5'"
    ):
        EngineConfig(tensor_parallel_size=2, data_parallel_size=2, gpu_device_ids="4,5").of_replica(0)


def test_replicas_of_one_rank_need_no_mpi_and_several_machines_are_refused() -> None:
    assert EngineConfig(data_parallel_size=2).launcher == "uniproc"
    assert EngineConfig(data_parallel_size=2, executor="uniproc").num_ranks == 2
    with pytest.raises(ConfigurationError, match="unset mpi_hostfile, or start a server on each machine"):
        EngineConfig(data_parallel_size=2, mpi_hostfile="hosts")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (
            {"context_replicas": 2, "data_parallel_size": 2, "max_tokens_in_buffer": 16},
            "must be below data_parallel_size",
        ),
        ({"context_replicas": 1, "data_parallel_size": 2}, "set max_tokens_in_buffer to the tokens"),
        ({"max_tokens_in_buffer": 16, "tensor_parallel_size": 2, "mpi_hostfile": "hosts"}, "unset mpi_hostfile"),
        ({"kv_transfer_interface": "lo"}, "set max_tokens_in_buffer, or unset it"),
        ({"kv_transfer_key_file": "key"}, "set max_tokens_in_buffer, or unset it"),
        ({"max_tokens_in_buffer": 9}, "at least a block"),
        ({"kv_transfer_interface": "lo", "max_tokens_in_buffer": 16}, "set kv_transfer_key_file"),
    ],
)
def test_what_hands_contexts_over_belongs_together(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        EngineConfig(**options)


@pytest.mark.parametrize("key", ["mpi_hostfile", "mpi_interface"])
@pytest.mark.parametrize(
    "options", [{"executor": "multiproc", "tensor_parallel_size": 2}, {"executor": "external"}, {}]
)
def test_what_mpiexec_is_told_needs_mpiexec(key: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"unset {key}, or set executor to mpi"):
        EngineConfig(**options, **{key: "eth9"})


def test_an_interface_is_for_several_machines() -> None:
    with pytest.raises(ConfigurationError, match="set mpi_hostfile, or unset mpi_interface"):
        EngineConfig(tensor_parallel_size=2, mpi_interface="eth9")


@pytest.mark.parametrize(("device", "sizes"), [("cpu", (64, 2048, 16)), ("cuda", (256, 8192, 64))])
def test_sizes_that_are_unset_suit_the_device(device: str, sizes: tuple[int, int, int]) -> None:
    config = EngineConfig().for_device(device)
    assert (config.max_batch_size, config.max_num_tokens, config.tokens_per_block) == sizes
    assert config.for_device(device) == config
    assert EngineConfig.from_parameters(EngineConfig().to_parameters()).for_device(device).max_batch_size == sizes[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_that_are_set_hold_and_the_others_give_way(device: str) -> None:
    config = EngineConfig(max_batch_size=8, max_num_tokens=64, tokens_per_block=4)
    assert config.for_device(device) == config
    few = EngineConfig(max_num_tokens=32).for_device(device)
    many = EngineConfig(max_batch_size=10_000).for_device(device)
    assert (few.max_batch_size, few.max_num_tokens) == (32, 32)
    assert (many.max_batch_size, many.max_num_tokens) == (10_000, 10_000)
    with pytest.raises(ConfigurationError, match=r"max_num_tokens \(32\) must be at least max_batch_size \(33\)"):
        EngineConfig(max_num_tokens=32, max_batch_size=33)
    assert EngineConfig(max_queue_size=3).for_device("cpu").max_in_flight == 67


def test_ranks_are_divided_into_equal_sets_with_experts_of_their_own() -> None:
    EngineConfig(tensor_parallel_size=4, moe_expert_parallel_size=2)
    sentence = r"moe_expert_parallel_size \(3\) must divide tensor_parallel_size \(4\), whose ranks share the experts"
    with pytest.raises(ConfigurationError, match=sentence):
        EngineConfig(tensor_parallel_size=4, moe_expert_parallel_size=3)


def test_replicas_do_not_share_a_gpu() -> None:
    with pytest.raises(ConfigurationError, match=r"gpu_device_ids names GPU 1 for two ranks, got '0,1, 1,2'"):
        EngineConfig(tensor_parallel_size=2, data_parallel_size=2, gpu_device_ids="0,1, 1,2")
    EngineConfig(tensor_parallel_size=4, gpu_device_ids="0,1,0,1", mpi_hostfile="hosts")  # two machines


@pytest.mark.parametrize(
    ("changes", "may_lead"),
    [
        ({"tensor_parallel_size": 2}, True),
        ({}, False),
        ({"tensor_parallel_size": 2, "executor": "mpi"}, False),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, False),
        ({"tensor_parallel_size": 2, "spare_ranks": 1, "max_tokens_in_paged_kv_cache": 4096}, False),
    ],
)
def test_an_mpi_job_is_led_by_one_set_of_several_ranks(changes: dict[str, Any], may_lead: bool) -> None:
    assert EngineConfig(**changes).may_lead_mpi_job is may_lead


@pytest.mark.parametrize(("key", "harmless"), UNSUPPORTED_KEYS.items())
def test_a_key_of_a_feature_that_is_missing_is_refused_if_it_asks_for_it(
    key: str, harmless: tuple[str, ...] | None
) -> None:
    accepted = ["medusa"] if harmless is None else [*harmless, *(f" {each.upper()} " for each in harmless), "${key}"]
    for value in accepted:
        assert EngineConfig.from_parameters({key: value}) == EngineConfig.from_parameters({})
    if harmless is not None:
        allowed = f" \\(only {' or '.join(harmless)}\\)" if harmless else ""
        sentence = f"{key}: this engine does not support 'medusa'{allowed}; leave it unset"
        with pytest.raises(ConfigurationError, match=sentence):
            EngineConfig.from_parameters({key: "medusa"})
