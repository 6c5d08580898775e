"""After the warm-up no request meets a kernel that is not compiled: whatever it asks for, and whoever it runs beside.

Which compiled kernel a launch needs is decided by triton's own code, see fake_cuda.launches.

Run: pytest ci/unit/gpu/test_warmup.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda.context import fake_cuda
from fake_cuda.engine import BLOCK_SIZE, FakeEngine
from fake_cuda.modes import MODES, Mode, steps_of, steps_of_draft_model
from fake_cuda.networks import FAMILIES, LLAMA_8B
from fp8_checkpoints import BLOCK_QUANTIZATION, QUANTIZATION, STATIC_QUANTIZATION

from inflight.request_limits import RequestLimits
from inflight.runtime import warmup
from inflight.runtime.step_sizes import StepSizes
from inflight.runtime.warmup import warmup_steps
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NewSequence, RowWork, SchedulerOutput
from inflight_kernels.matmul.gpu.linear import CANDIDATES
from inflight_kernels.tuning import trying

pytestmark = pytest.mark.slow

NUM_ROWS = 24
NETWORK = {**LLAMA_8B, "num_hidden_layers": 1}
NARROW = {
    **NETWORK,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
"""Of so few outputs that products are split in many ways."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
CONFIG = CANDIDATES[5]
"""Of the linear layers: for as many tokens as they ever multiply."""
NOT_WARM = ("post-processor",)
"""Functions of others are not called."""


def step_of(modes: list[Mode], lengths: list[int]) -> SchedulerOutput:
    """A row for each length: a prompt of so many tokens, 0 for a decode."""
    news = [
        NewSequence(
            row=row,
            token_ids=[5] * max(length, 100),
            num_prompt_tokens=max(length, 100),
            block_ids=[row % 7] * (max(length, 100) // BLOCK_SIZE + 1),
            sampling_config=SamplingConfig(**mode.sampling),
            **mode.new,
        )
        for row, (mode, length) in enumerate(zip(modes, lengths, strict=True))
    ]
    rows = [
        RowWork(row=new.row, start=0, num_tokens=length, token_ids=new.token_ids[:length])
        if length
        else RowWork(row=new.row, start=99, num_tokens=1, token_ids=[5])
        for new, length in zip(news, lengths, strict=True)
    ]
    return SchedulerOutput(new_sequences=news, rows=rows)


def traffic(seed: int) -> Iterator[SchedulerOutput]:
    """Every kind of request by itself, every number of rows, and steps of kinds and lengths at random."""
    served = {name: mode for name, mode in MODES.items() if name not in NOT_WARM and not mode.draft_index}
    for name, mode in served.items():
        if name != "adapter":
            yield from (step for _, step in steps_of(mode))
    for count in (1, 2, 3, 7, 12, 17, NUM_ROWS):
        yield step_of([MODES["greedy"]] * count, [0] * count)
    for length in (3, 14, 31, 65, 300, 2000, 4000):
        yield step_of([MODES["greedy"]], [length])
    chance = random.Random(seed)
    for _ in range(15):
        count = chance.randint(1, 12)
        lengths = [chance.choice((0, 0, 0, 2, 17, 100, 400)) for _ in range(count)]
        yield step_of([served[chance.choice(list(served))] for _ in range(count)], lengths)


@pytest.mark.parametrize("options", [{"with_options": True}, {"deterministic": True, "with_options": True}])
def test_no_request_waits_for_the_compiler(options: dict[str, Any], tmp_path: Path) -> None:
    """On a device whose table says that the kernels multiply."""
    with fake_cuda() as device, trying("linear", CONFIG), trying("gated_linear", CONFIG):
        engine = FakeEngine(device, tmp_path, NETWORK, max_batch_size=NUM_ROWS, warms_up=True, **options)
        compiled = set(device.compiled)
        for step in traffic(seed=1):
            engine.step(step)
        assert device.compiled - compiled == set()
        for _, step in steps_of(MODES["post-processor"]):
            engine.step(step)
        late = {key.split()[0] for key in device.compiled - compiled}
        assert late <= {"tile_stats_kernel", "pick_kernel"}, late


@pytest.mark.parametrize(
    ("quantization", "options"),
    [
        (QUANTIZATION, {"kv_dtype": torch.float8_e4m3fn}),
        (QUANTIZATION, {"with_options": True}),
        (STATIC_QUANTIZATION, {}),
        (BLOCK_QUANTIZATION, {}),
        (AWQ, {}),
    ],
    ids=["fp8, as the cache", "fp8 with adapters", "fp8 with static scales", "fp8 by blocks", "awq"],
)
def test_nor_with_quantised_weights(quantization: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Whose launches depend on the number of tokens, however many they are."""
    with fake_cuda() as device:
        values = {**NARROW, "quantization_config": quantization}
        engine = FakeEngine(device, tmp_path, values, max_batch_size=16, warms_up=True, **options)
        compiled = set(device.compiled)
        for length in (3, 14, 31, 65, 80, 100, 129, 200, 257, 300, 385, 400, 513, 700, 1025, 2000, 4000):
            engine.step(step_of([MODES["greedy"]], [length]))
        assert device.compiled - compiled == set()
    is_fused = quantization is not AWQ and "with_options" not in options
    assert any(key.startswith("activate_and_mul_") and "fp8e4nv" in key for key in compiled) == is_fused


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("mixtral", None),
        ("qwen3 moe", None),
        ("qwen3 moe", BLOCK_QUANTIZATION),
        ("qwen2 moe", None),
        ("gpt-oss", None),
    ],
    ids=["mixtral", "qwen3 moe", "qwen3 moe in fp8", "qwen2 moe", "gpt-oss"],
)
def test_nor_does_a_mixture_of_experts(
    family: str, quantization: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches depend on the number of tokens: alone, sorted by one program or by several, in tiles of any size."""
    network = {**FAMILIES[family], "quantization_config": quantization}
    monkeypatch.setattr(warmup._Steps, "samplings", lambda _: ())
    assert "moe_down_kernel" in compiled_by_the_warm_up_alone(network, tmp_path)


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("gemma 2", "prefill_attention_kernel"),
        ("olmo 2", "rms_norm_kernel"),
        ("cohere 2", "layer_norm_kernel"),
        ("gpt-2", "activate_kernel"),
        ("qwen3.5", "gated_delta_rule_kernel"),
        ("falcon h1", "state_space_scan_kernel"),
    ],
)
def test_nor_do_parts_that_llama_lacks(
    family: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kernels sample is the same for all."""
    monkeypatch.setattr(warmup._Steps, "samplings", lambda _: ())
    assert kernel in compiled_by_the_warm_up_alone(FAMILIES[family], tmp_path)


def compiled_by_the_warm_up_alone(network: dict[str, Any], folder: Path) -> set[str]:
    """Names of the kernels that a warm-up compiles. AssertionError if steps of any number of tokens need more."""
    with fake_cuda() as device:
        engine = FakeEngine(device, folder, network, max_batch_size=4, warms_up=True)
        compiled = set(device.compiled)
        for length in (0, 3, 33, 65, 129, 300, 384, 700, 1030, 1700, 2050, 4000):
            engine.step(step_of([MODES["greedy"]] * 2, [length, 0]))
        assert device.compiled - compiled == set()
    return {key.split()[0] for key in compiled}


def test_nor_do_drafts_of_a_draft_model(tmp_path: Path) -> None:
    with fake_cuda() as device:
        engine = FakeEngine(device, tmp_path, NETWORK, max_batch_size=16, warms_up=True, with_draft_model=True)
        compiled = set(device.compiled)
        for name in ("greedy", "filters", "penalties"):
            for _, step in steps_of_draft_model(MODES[name]):
                engine.step(step)
        assert device.compiled - compiled == set()


def test_nor_do_requests_whose_keys_are_stored_in_fp8(tmp_path: Path) -> None:
    with fake_cuda() as device:
        engine = FakeEngine(device, tmp_path, NETWORK, max_batch_size=8, warms_up=True, kv_dtype=torch.float8_e4m3fn)
        compiled = set(device.compiled)
        for lengths in ([0] * 8, [0] * 3, [4000], [17], [0, 0, 65, 300]):
            engine.step(step_of([MODES["greedy"]] * len(lengths), lengths))
        assert device.compiled == compiled
    attention = {key.split()[0] for key in compiled if "fp8e4nv" in key}
    assert {"rope_kv_write_kernel", "prefill_attention_kernel"} <= attention, attention


@pytest.mark.parametrize("left_out", ["decodes", "prefills", "samplings"])
def test_what_the_warm_up_leaves_out_is_noticed(left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = SchedulerOutput(new_sequences=[], rows=[])
    nothing = empty if left_out == "decodes" else ()
    monkeypatch.setattr(warmup._Steps, left_out, lambda *_: nothing)
    with fake_cuda() as device:
        engine = FakeEngine(device, tmp_path, NETWORK, max_batch_size=8, warms_up=True)
        compiled = set(device.compiled)
        for mode in (MODES["greedy"], MODES["logit bias"]):
            for lengths in ([0] * 8, [4000]):
                engine.step(step_of([mode] * len(lengths), lengths))
        assert device.compiled - compiled


def test_steps_fit_into_every_engine() -> None:
    """A cache of one block, prompts of one token, a batch of one row."""
    for rows, tokens, length in ((1, 1, 2), (1, 64, 3), (5, 7, 64), (256, 8192, 4096)):
        limits = RequestLimits(vocab_size=9, max_seq_len=length, max_input_len=length - 1, kv_cache_tokens=16)
        sizes = StepSizes.of("cuda", rows)
        steps = warmup_steps(sizes, limits, num_rows=rows, block_size=16, max_num_tokens=tokens)
        for step in steps:
            assert all(set(new.block_ids) == {0} for new in step.new_sequences)
            assert all(work.row < rows and work.start + work.num_tokens <= length for work in step.rows)
            prefilled = sum(work.num_tokens for work in step.rows if work.num_tokens > 1)
            assert prefilled <= max(tokens, 1) and len(step.rows) <= rows


def test_the_longest_prompts_are_multiples_of_16_and_others() -> None:
    limits = RequestLimits(vocab_size=9, max_seq_len=100_000, max_input_len=99_999, kv_cache_tokens=16)
    sizes = StepSizes.of("cuda", 2)
    steps = warmup_steps(sizes, limits, num_rows=2, block_size=16, max_num_tokens=8192)
    assert {8191, 8192} <= {work.num_tokens for step in steps for work in step.rows}


def test_a_cpu_takes_a_few_steps() -> None:
    limits = RequestLimits(vocab_size=9, max_seq_len=64, max_input_len=63, kv_cache_tokens=64)
    assert len(warmup_steps(StepSizes(), limits, num_rows=8, block_size=16, max_num_tokens=64)) == 4
