"""The runner's two halves, its memory, and what fails when: on a CPU, with a tiny network.

Run: pytest ci/unit/runtime/test_model_runner.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import force, needs_compiler
from fake_cuda.networks import FakeRanks
from model_driver import Driver, Work, launch
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_prompt

from inflight.checkpoint_digest import checkpoint_digest
from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.layers.attention import KeyValueSpec
from inflight.runtime import state_store
from inflight.runtime.device import choose_device, count_threads, with_settled_dtype
from inflight.runtime.loading import LoadedEngine, load_engine
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.runner import Runner
from inflight.runtime.state_store import StateShape, StateStore, count_units
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NewSequence, RowWork, SchedulerOutput
from inflight_kernels import cpu
from inflight_kernels.cpu import library, variants

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SPEC = KeyValueSpec(num_kv_heads=2, head_dim=8, dtype=torch.float32).state_spec
SHAPE = StateShape(specs=(SPEC, SPEC), block_size=4)
BLOCK_BYTES = 2 * 2 * 4 * 2 * 8 * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture
def runner(checkpoint: TinyCheckpoint) -> Iterator[ModelRunner]:
    config = EngineConfig(
        gpt_model_path=str(checkpoint.folder),
        device="cpu",
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=64,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=256,
    )
    runner = ModelRunner.load(config, SingleRank())
    yield runner
    runner.close()


def first_step(prompt: list[int], row: int = 0) -> SchedulerOutput:
    new = NewSequence(
        row=row,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_ids=list(range(10)),
        sampling_config=SamplingConfig(),
    )
    prefill = RowWork(row=row, start=0, num_tokens=len(prompt), token_ids=prompt)
    return SchedulerOutput(new_sequences=[new], rows=[prefill])


def decode_step(start: int, row: int = 0) -> SchedulerOutput:
    decode = RowWork(row=row, start=start, num_tokens=1)
    return SchedulerOutput(new_sequences=[], rows=[decode])


# -- launch and collect ------------------------------------------------------------------------------------------------


def test_it_is_a_runner(runner: ModelRunner) -> None:
    as_runner: Runner = runner
    assert as_runner.memory_usage()[0] > 2**20


def test_launch_does_not_wait_for_the_step(
    runner: ModelRunner, checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps are launched while the first one stands still; each feeds the next on the device."""
    gate = threading.Event()
    compute = runner._computation.decoder.logits

    def held(hidden: torch.Tensor) -> torch.Tensor:
        assert gate.wait(60)
        return compute(hidden)

    monkeypatch.setattr(type(runner._computation.decoder), "logits", lambda decoder, hidden: held(hidden))
    prompt, expected = checkpoint.prompt(7, 3)
    handles = [launch(runner, step) for step in (first_step(prompt), decode_step(7), decode_step(8))]
    gate.set()
    assert [runner.collect(handle).token_ids for handle in handles] == [[[token]] for token in expected]


def test_a_failing_step_raises_in_collect_and_the_next_goes_on(
    runner: ModelRunner, checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, expected = checkpoint.prompt(7, 1)
    with monkeypatch.context() as patched:
        patched.setattr(type(runner._computation.decoder), "forward", lambda *arguments: 1 / 0)
        handle = launch(runner, first_step(prompt))
        with pytest.raises(ZeroDivisionError):
            runner.collect(handle)
    assert runner.collect(launch(runner, first_step(prompt))).token_ids == [expected]


def test_a_step_without_sampling_rows(runner: ModelRunner) -> None:
    prompt = make_prompt(9)
    step = first_step(prompt)
    part = RowWork(row=0, start=0, num_tokens=5, token_ids=prompt[:5], num_sampled=0)
    output = runner.collect(launch(runner, SchedulerOutput(new_sequences=step.new_sequences, rows=[part])))
    assert output.token_ids == []
    assert output.log_probs is None


def test_an_empty_step(runner: ModelRunner) -> None:
    empty = SchedulerOutput(new_sequences=[], rows=[])
    assert runner.collect(launch(runner, empty)).token_ids == []


def test_close_finishes_what_was_launched(checkpoint: TinyCheckpoint, runner: ModelRunner) -> None:
    prompt, expected = checkpoint.prompt(7, 1)
    handle = launch(runner, first_step(prompt))
    before = step_threads()  # of runners of other tests, too, which may not be closed
    runner.close()
    assert runner.collect(handle).token_ids == [expected]
    assert len(before - step_threads()) == 1


def step_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("inflight-step")}


def test_a_sequence_fills_max_seq_len(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """64 tokens in all, and the step that overlap has launched beyond the last is harmless."""
    prompt, expected = checkpoint.prompt(60, 4)
    work = Work(prompt=prompt, max_tokens=5)
    Driver(runner).run([work])
    assert work.output[:4] == expected


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_processor_without_bfloat16_computes_in_float32_unless_told(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, KV cache, and the description that clients and other engines see; and the log says how to change it."""
    name = str(stored).removeprefix("torch.")
    folder = make_checkpoint(tmp_path / "checkpoint", "llama", dtype=stored).folder
    config = EngineConfig(
        gpt_model_path=str(folder), device="cpu", tokens_per_block=4, max_batch_size=2, max_seq_len=16
    )
    caplog.set_level("INFO", "inflight")

    def load(config: EngineConfig) -> LoadedEngine:
        caplog.clear()
        return load_engine(config, SingleRank())

    def told() -> list[str]:
        return [line for line in caplog.messages if line.startswith(f"the checkpoint is in {name} and is computed in")]

    monkeypatch.setattr(library, "processor_flags", lambda: variants.AVX512_BF16.needs)
    usual = load(replace(config, cpu_compile="false"))
    assert usual.description.dtype == name and told() == []
    monkeypatch.setattr(library, "processor_flags", lambda: variants.AVX2.needs)
    wide = load(config)
    assert {spec.tensors[0].dtype for spec in wide.decoder.state_specs} == {torch.float32}
    assert wide.store.states[0]["keys"].nbytes == 2 * usual.store.states[0]["keys"].nbytes
    assert wide.description.dtype == wide.description.weight_dtype == wide.description.kv_cache_dtype == "float32"
    assert checkpoint_digest([str(folder)], wide.description) != checkpoint_digest([str(folder)], usual.description)
    [line] = told()
    assert "no AVX-512 for bfloat16" in line and f"dtype={name}" in line
    chosen = load(replace(config, dtype=name))
    assert chosen.description.dtype == name and told() == []


@needs_compiler
def test_layers_in_cpp_keep_16_bits_on_any_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "llama-wide", dtype=torch.float16).folder
    config = EngineConfig(
        gpt_model_path=str(folder), device="cpu", tokens_per_block=4, max_batch_size=2, max_seq_len=16
    )
    monkeypatch.setattr(library, "processor_flags", lambda: variants.AVX2.needs)
    force(monkeypatch, variant=variants.AVX2)
    description = load_engine(config, SingleRank()).description
    assert (description.dtype, description.layers) == ("float16", "compiled")
    in_torch = load_engine(replace(config, cpu_compile="false"), SingleRank()).description
    assert (in_torch.dtype, in_torch.layers) == ("float32", "native")


def test_ranks_on_several_machines_do_not_count_on_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """They sum through sockets, so torch computes their layers."""
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(cpu, "unsupported_reason", lambda: "")
    for several_hosts, dtype in ((False, "auto"), (True, "float32")):
        rank = replace(FakeRanks().rank(0), several_hosts=several_hosts)
        assert with_settled_dtype(EngineConfig(), torch.bfloat16, CPU, rank, compiles=True).dtype == dtype


def test_the_leaders_processor_settles_the_type_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bfloat16, dtype in ((True, "auto"), (False, "float32")):
        ranks = FakeRanks()
        for number, own in enumerate((has_bfloat16, not has_bfloat16)):
            monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda own=own: own)
            settled = with_settled_dtype(EngineConfig(), torch.bfloat16, CPU, ranks.rank(number))
            assert settled.dtype == dtype


# -- memory ------------------------------------------------------------------------------------------------------------


def blocks(free_bytes: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    monkeypatch.setattr(state_store, "free_memory", lambda device, num_ranks: free_bytes)
    config = EngineConfig(tokens_per_block=4, **options).for_device("cpu")
    return count_units(config, SHAPE, ParallelGroups(), CPU, 0, 1 << 20).num_blocks


def test_a_cpu_that_was_told_nothing_keeps_what_a_full_batch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_store, "free_memory", lambda device, num_ranks: 2**40)
    config = EngineConfig(tokens_per_block=4, max_batch_size=3)
    assert count_units(config, SHAPE, ParallelGroups(), CPU, 0, max_seq_len=10) == (3 * 3, None)


def test_block_bytes() -> None:
    assert SHAPE.block_bytes == BLOCK_BYTES


def test_layers_may_differ() -> None:
    """Each has a cache of its own shape and type, and a block's bytes are those of all."""
    wide = KeyValueSpec(num_kv_heads=1, head_dim=24, dtype=torch.bfloat16, sliding_window=5).state_spec
    shape = StateShape(specs=(SPEC, wide), block_size=4)
    assert shape.block_bytes == BLOCK_BYTES // 2 + 2 * 4 * 24 * 2
    cache = StateStore(shape, 3, CPU)
    assert [layer["keys"].shape for layer in cache.states] == [(4, 4, 2, 8), (4, 4, 1, 24)]
    assert [layer["values"].dtype for layer in cache.states] == [torch.float32, torch.bfloat16]


def test_blocks_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(10 * BLOCK_BYTES, monkeypatch, max_tokens_in_paged_kv_cache=43) == 10


def test_more_tokens_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as caught:
        blocks(3 * 2**30, monkeypatch, max_tokens_in_paged_kv_cache=10**12)
    assert str(caught.value) == (
        "max_tokens_in_paged_kv_cache 1000000000000 takes 238,418.58 GiB of memory in each rank, "
        "but 3.00 GiB are free; lower it or free memory"
    )
    with pytest.raises(ConfigurationError, match="max_tokens_in_paged_kv_cache 44 takes"):
        blocks(11 * BLOCK_BYTES - 1, monkeypatch, max_tokens_in_paged_kv_cache=44)


def test_blocks_by_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(100 * BLOCK_BYTES, monkeypatch, kv_cache_free_gpu_mem_fraction=0.5) == 50


def test_the_smaller_of_both_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"max_tokens_in_paged_kv_cache": 40, "kv_cache_free_gpu_mem_fraction": 0.5}
    assert blocks(100 * BLOCK_BYTES, monkeypatch, **both) == 10
    assert blocks(10 * BLOCK_BYTES, monkeypatch, **both) == 5


def test_default_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the host's free memory, at most 4 GiB."""
    assert blocks(100 * BLOCK_BYTES, monkeypatch) == 20
    assert blocks(2**40, monkeypatch) == 4 * 2**30 // BLOCK_BYTES


def test_no_room_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as caught:
        blocks(BLOCK_BYTES, monkeypatch, kv_cache_free_gpu_mem_fraction=0.5)
    assert str(caught.value) == (
        "there is no room for the KV cache: a block of 4 tokens takes 1024 bytes; "
        "raise max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction, lower tokens_per_block, or free memory"
    )


# -- device ------------------------------------------------------------------------------------------------------------


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(EngineConfig(), 0) == CPU
    with pytest.raises(ConfigurationError, match="torch finds no GPU"):
        choose_device(EngineConfig(device="cuda"), 0)


def test_gpu_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5) if index == 0 else (8, 0))
    assert choose_device(EngineConfig(), 2) == torch.device("cuda", 2)
    assert choose_device(EngineConfig(gpu_device_ids="3,1"), 1) == torch.device("cuda", 1)
    assert choose_device(EngineConfig(device="cpu"), 1) == CPU
    with pytest.raises(ConfigurationError, match="gpu_device_ids must be one number for each rank"):
        choose_device(EngineConfig(gpu_device_ids="3"), 1)
    with pytest.raises(ConfigurationError, match="rank 0 is to run on GPU 7, but this machine has 4"):
        choose_device(EngineConfig(gpu_device_ids="7"), 0)
    with pytest.raises(ConfigurationError, match=r"GPU 0 has compute capability 7\.5, but the kernels need 8\.0"):
        choose_device(EngineConfig(), 0)
    with pytest.raises(ConfigurationError) as caught:
        choose_device(EngineConfig(kv_cache_dtype="fp8"), 2)
    assert str(caught.value) == (
        "kv_cache_dtype is fp8, but GPU 2 has compute capability 8.0, and the kernels convert to fp8 from 8.9 (Ada) "
        "on: set kv_cache_dtype to auto, or name another GPU in gpu_device_ids"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    assert choose_device(EngineConfig(kv_cache_dtype="fp8"), 2) == torch.device("cuda", 2)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigurationError, match="this torch is for AMD GPUs"):
        choose_device(EngineConfig(), 2)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert count_threads(EngineConfig(num_threads=5), 2) == 5
    assert count_threads(EngineConfig(), 2) == 3
    assert count_threads(EngineConfig(), 8) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert count_threads(EngineConfig(num_threads=5), 2) == 5
    assert count_threads(EngineConfig(), 2) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # of nested regions, which there are not
    assert count_threads(EngineConfig(), 2) == 3
