"""What is run before the KV cache of a GPU is sized: the largest steps, here of a tiny network on a CPU.

pytest ci/unit/runtime/test_memory_profile.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny_checkpoints import TinyCheckpoint, make_checkpoint

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import InsufficientMemory
from inflight.logits_post_processor import LogitsPostProcessorConfig
from inflight.models.decoder import Decoder
from inflight.request_limits import RequestLimits
from inflight.runtime import loading, model_runner, state_store
from inflight.runtime.loading import EngineParts, LoadedEngine, load_engine, load_parts
from inflight.runtime.memory_profile import largest_steps, step_bytes
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.sampler import SampledTokens, Sampler
from inflight.runtime.sampling_input import SamplingInput

pytestmark = pytest.mark.slow

BEFORE, PEAK = 1000, 5000
MAX_BATCH_SIZE, MAX_NUM_TOKENS = 6, 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def config_of(checkpoint: TinyCheckpoint, **options: Any) -> EngineConfig:
    return EngineConfig(
        gpt_model_path=str(checkpoint.folder),
        device="cpu",
        max_batch_size=MAX_BATCH_SIZE,
        max_num_tokens=MAX_NUM_TOKENS,
        tokens_per_block=4,
        **options,
    )


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called of torch.cuda's memory statistics."""
    called: list[str] = []

    def stand_in(name: str, result: object) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: called.append(name) or result)

    stand_in("synchronize", None)
    stand_in("memory_allocated", BEFORE)
    stand_in("memory_reserved", BEFORE)
    stand_in("max_memory_allocated", PEAK)
    stand_in("reset_peak_memory_stats", None)
    stand_in("empty_cache", None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7000, 9000))
    stand_in("current_stream", None)
    stand_in("stream", contextlib.nullcontext())
    return called


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each batch that a network has computed."""
    sizes: list[int] = []
    forward = Decoder.forward

    def noted(self: Decoder, x_T: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(x_T))
        return forward(self, x_T, *others)

    monkeypatch.setattr(Decoder, "forward", noted)
    return sizes


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, SamplingInput]]:
    """Number of rows of each batch that was sampled, and how."""
    found: list[tuple[int, SamplingInput]] = []
    sample = Sampler.__call__

    def noted(self: Sampler, logits_SV: torch.Tensor, sampling: SamplingInput, *others: Any) -> SampledTokens:
        found.append((len(logits_SV), sampling))
        return sample(self, logits_SV, sampling, *others)

    monkeypatch.setattr(Sampler, "__call__", noted)
    return found


@pytest.mark.parametrize("drafts", [False, True])
def test_the_largest_steps_have_every_row_every_token_and_every_option(
    checkpoint: TinyCheckpoint,
    thread: ThreadPoolExecutor,
    cuda: list[str],
    batches: list[int],
    samples: list[tuple[int, SamplingInput]],
    drafts: bool,
) -> None:
    options = {"speculative_model_dir": str(checkpoint.folder)} if drafts else {}
    parts = load_parts(config_of(checkpoint, max_loras=1, **options), SingleRank())
    runners: list[ModelRunner] = []

    def runner_of(engine: LoadedEngine) -> ModelRunner:
        none = LogitsPostProcessorConfig()
        of = partial(ModelRunner._of, config=parts.config, thread=thread, rank_group=SingleRank())
        runners.append(of(engine, post_processors=none))
        return runners[0]

    assert step_bytes(parts, runner_of) == PEAK - BEFORE
    assert cuda.index("memory_allocated") < cuda.index("reset_peak_memory_stats") < cuda.index("max_memory_allocated")
    assert cuda[-2:] == ["empty_cache", "memory_reserved"]
    assert max(batches) >= MAX_NUM_TOKENS and MAX_BATCH_SIZE in batches, "prompts, and a full batch of decodes"
    full = [sampling for size, sampling in samples if size == MAX_BATCH_SIZE]
    assert len(full) >= 3
    for sampling in full[:3] if not drafts else full[-2:]:
        assert all(getattr(sampling.needs, field.name) for field in fields(sampling.needs)), sampling.needs
        assert sampling.restrictions is not None and sampling.restrictions.beginnings_XL is not None
        assert sampling.ngrams is not None and sampling.typical_K is not None
    state = runners[0]._computation.state
    for part in (state.history, state.prompt_mask_RV, state.output_counts_RV, state.bias_RV):
        assert part is not None and len(part) == MAX_BATCH_SIZE + 1
    assert drafts == (sum(len(sampling.rows_S) == MAX_BATCH_SIZE // 2 for _, sampling in samples) > 0)


def test_what_graphs_keep_is_counted(
    checkpoint: TinyCheckpoint, thread: ThreadPoolExecutor, cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pool is taken from the device before the steps run, which find no room in it; and what the driver has of
    them, until they are gone."""
    parts = load_parts(config_of(checkpoint), SingleRank())
    pool_bytes: list[int] = []

    def record_graphs(self: ModelRunner) -> None:
        pool_bytes.append(300)

    monkeypatch.setattr(ModelRunner, "record_graphs", record_graphs)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: BEFORE + 70 + sum(pool_bytes))

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        are_there = pool_bytes and cuda.count("empty_cache") < 3
        return (6800 if are_there else 7000), 9000

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    of = partial(ModelRunner._of, config=parts.config, thread=thread, rank_group=SingleRank())
    assert step_bytes(parts, partial(of, post_processors=LogitsPostProcessorConfig())) == PEAK - BEFORE + 300 + 200


@pytest.mark.parametrize("max_seq_len", [2, 3, 5, 64])
def test_steps_stay_within_the_bounds_of_short_sequences(max_seq_len: int) -> None:
    limits = RequestLimits(
        vocab_size=9,
        max_seq_len=max_seq_len,
        max_input_len=max_seq_len - 1,
        kv_cache_tokens=4,
        max_batch_size=3,
        has_draft_model=True,
    )
    steps = list(largest_steps(limits, 4, 100, is_staged=False))
    ends = [work.start + work.num_tokens for step in steps for work in step.rows]
    assert max(ends) <= max_seq_len
    assert all(4 * len(new.block_ids) >= max(ends) for new in steps[0].new_sequences)
    assert len(steps) == (4 if max_seq_len > 3 else 3)
    assert steps[0] == steps[1], "once more, beside what is kept of the first"


def test_pipeline_stages_are_told_every_token() -> None:
    limits = RequestLimits(vocab_size=9, max_seq_len=9, max_input_len=8, kv_cache_tokens=4, max_batch_size=3)
    for step in largest_steps(limits, 4, 8, is_staged=True):
        assert all(len(work.token_ids) == work.num_tokens for work in step.rows)


def test_a_step_that_does_not_fit_names_its_sizes(checkpoint: TinyCheckpoint, cuda: list[str]) -> None:
    def runner_of(engine: LoadedEngine) -> ModelRunner:
        raise torch.OutOfMemoryError("CUDA out of memory")

    parts = load_parts(config_of(checkpoint), SingleRank())
    with pytest.raises(InsufficientMemory, match="a step of max_num_tokens 64 and max_batch_size 6 does not fit"):
        step_bytes(parts, runner_of)


def test_on_a_cpu_nothing_is_measured(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(checkpoint, kv_cache_free_gpu_mem_fraction=0.5)
    free_bytes = 100 * load_parts(config, SingleRank()).state_shape.block_bytes
    monkeypatch.setattr(state_store, "free_memory", lambda device, num_ranks: free_bytes)
    assert load_engine(config, SingleRank(), lambda parts: free_bytes).store.num_blocks == 50


def test_what_steps_take_on_a_gpu_is_kept_from_the_kv_cache(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(checkpoint, kv_cache_free_gpu_mem_fraction=0.5)
    parts = replace(load_parts(config, SingleRank()), device=torch.device("cuda"))
    free_bytes = 100 * parts.state_shape.block_bytes
    monkeypatch.setattr(state_store, "free_memory", lambda device, num_ranks: free_bytes)
    monkeypatch.setattr(loading, "load_parts", lambda *_: parts)
    monkeypatch.setattr(loading, "with_cache", lambda parts, units, *_, **__: units)
    assert load_engine(config, SingleRank(), lambda parts: free_bytes // 2).num_blocks == 25


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_largest_steps_take_no_more_than_was_measured(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []

    def measure(parts: EngineParts, **options: Any) -> int:
        found.append((torch.cuda.memory_allocated(), step_bytes(parts, **options)))
        return found[0][1]

    monkeypatch.setattr(model_runner, "step_bytes", measure)
    config = replace(config_of(checkpoint, max_tokens_in_paged_kv_cache=512), device="cuda")
    runner = ModelRunner.load(config, SingleRank())
    ((weight_bytes, measured_bytes),) = found
    cache_bytes = sum(layer["keys"].nbytes + layer["values"].nbytes for layer in runner._store.states)
    torch.cuda.reset_peak_memory_stats()
    for step in largest_steps(runner.limits, runner.block_size, MAX_NUM_TOKENS, is_staged=False):
        handle = runner.forward(step)
        runner.sample(handle)
        runner.collect(handle)
    assert 0 < torch.cuda.max_memory_allocated() - weight_bytes - cache_bytes <= measured_bytes
    runner.close()
