"""Decode steps that replay graphs, of experts and of fp8 weights with an fp8 cache: the tokens of steps that launch
each kernel.

Run: pytest ci/kernels/test_network_graphs.py
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import add_cache_scales, write_fp8_checkpoint
from model_driver import Work
from tiny_checkpoints import make_checkpoint, make_prompt

from ci.kernels.recorded_runners import graphs_on_cpu, load_greedy, run_two_rows, without_graphs
from inflight.distributed.rank_group import SingleRank

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the graphs are recorded on the CPU, for the interpreter"),
]


def test_each_replay_routes_its_own_tokens_to_experts(tmp_path: Path) -> None:
    """Which experts a token goes to is decided on the device: the grids are the same whatever it is."""
    assert_replays_give_the_same_tokens(make_checkpoint(tmp_path, "qwen3-moe").folder)


@pytest.mark.parametrize("static", [False, True])
def test_replays_quantise_activations_keys_and_values(static: bool, tmp_path: Path) -> None:
    """To fp8, with the scales of the weights, of each token or of all, and of the cache."""
    folder = write_fp8_checkpoint(tmp_path, static=static).folder
    add_cache_scales(folder)
    assert_replays_give_the_same_tokens(folder, kv_cache_dtype="fp8")


def assert_replays_give_the_same_tokens(folder: Path, **options: Any) -> None:
    """`options`: of EngineConfig."""
    own = [Work(prompt=make_prompt(5), max_tokens=5), Work(prompt=make_prompt(7, 2), max_tokens=3, arrives=2)]
    with graphs_on_cpu(), closing(load_greedy(folder, SingleRank(), **options)) as runner:
        found = run_two_rows(runner, own)
        assert sum(runner._computation._networks.num_replays.values()) >= 3
        with without_graphs(runner):
            expected = run_two_rows(runner, [Work(prompt=work.prompt, max_tokens=work.max_tokens) for work in own])
    assert found == expected
