"""The number of launches that `make gpu-bench` predicts is that of a step on a GPU that computes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_cuda.context import fake_cuda
from fake_cuda.engine import FakeEngine
from fake_cuda.modes import MODES, PROMPT_LEN, Mode, begin, decodes
from fake_cuda.trace import LAUNCH, OPERATION, Trace
from fp8_checkpoints import STATIC_QUANTIZATION
from msgspec import structs

from ci.bench.gpu.networks import LLAMA_8B, LLAMA_8B_FP8, QWEN3_30B_A3B, Network
from ci.bench.gpu.predictions import ASSUMED, Model
from inflight.scheduler_output import RowWork, SchedulerOutput

STATIC_FP8 = replace(
    LLAMA_8B_FP8,
    name="8B static fp8",
    config={**LLAMA_8B_FP8.config, "quantization_config": STATIC_QUANTIZATION},
)
"""A step of static scales launches as much as one that quantises by token."""


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [2, 3])
@pytest.mark.parametrize(
    ("whole", "num_rows"),
    [
        (LLAMA_8B, 3),
        (LLAMA_8B, 72),
        (LLAMA_8B_FP8, 72),
        (STATIC_FP8, 72),
        *((QWEN3_30B_A3B, rows) for rows in (1, 4, 5, 64, 72)),
    ],
    ids=lambda value: value.name if isinstance(value, Network) else str(value),
)
def test_launches_are_predicted(whole: Network, num_rows: int, num_layers: int, tmp_path: Path) -> None:
    network = replace(whole, config={**whole.config, "num_hidden_layers": num_layers})
    mode, rows = MODES["greedy"], range(num_rows)
    with fake_cuda() as device:
        engine = FakeEngine(device, tmp_path, network.config, max_batch_size=num_rows)
        prefill, _ = engine.step(begin(mode, rows))
        first, _ = engine.step(SchedulerOutput(new_sequences=[], rows=decodes(mode, rows, PROMPT_LEN)))
        second, _ = engine.step(SchedulerOutput(new_sequences=[], rows=_without_new_blocks(mode, rows)))
    model = Model(network, ASSUMED)
    assert launches(prefill) == model.prefill_launches(num_rows * PROMPT_LEN)
    assert launches(first) == model.decode_launches(num_rows) + 1, "a row begins a block"
    assert launches(second) == model.decode_launches(num_rows)


def _without_new_blocks(mode: Mode, rows: range) -> list[RowWork]:
    return [structs.replace(work, new_block_ids=[]) for work in decodes(mode, rows, PROMPT_LEN + 1)]


def test_a_step_reads_the_experts_that_its_tokens_go_to() -> None:
    """All weights but those of the experts that no token goes to."""
    network, expert = QWEN3_30B_A3B, 48 * 2 * 3 * 2048 * 768
    assert network.held_bytes - network.read_bytes(1) == pytest.approx(120 * expert)
    assert network.held_bytes - network.read_bytes(2) == pytest.approx(112.5 * expert)
    assert network.read_bytes(4096) == pytest.approx(network.held_bytes)
    assert LLAMA_8B.read_bytes(1) == LLAMA_8B.held_bytes


def launches(trace: Trace) -> int:
    counts = trace.counts()
    return counts[LAUNCH] + counts[OPERATION]
