"""Networks whose layers have sliding windows: sequences give back the blocks that they have passed, and no token is
another one for it.

Run: pytest ci/unit/runtime/test_block_windows.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import needs_compiler
from network_engine import BLOCK_SIZE, MAX_SEQ_LEN, Engine
from tiny_checkpoints import COMPILED_CONFIGS, TinyCheckpoint, make_checkpoint, make_prompt

from inflight.config import SchedulerPolicy
from inflight.layers.attention import KeyValueSpec
from inflight.request import Request
from inflight.runtime.state_store import StateShape, StateStore, find_windows
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import NGramDecodingConfig

WINDOW = 11
WINDOWS = {
    "gemma3": (0, WINDOW, WINDOW),
    "gpt-oss": (0, WINDOW, WINDOW),
    "mistral-window": (WINDOW,),
    "qwen3-wide": (0, 13, 13),
}
"""Of the groups of layers, by the name of a network; the last one is computed in C++."""


def layers(*windows: int) -> tuple[Any, ...]:
    return tuple(
        KeyValueSpec(num_kv_heads=2, head_dim=8, dtype=torch.float32, sliding_window=window).state_spec
        for window in windows
    )


def windows_of(stages: Sequence[tuple[Any, ...]], max_seq_len: int = 1000) -> tuple[int, ...]:
    return find_windows([StateShape(specs=specs, block_size=4).layers for specs in stages], 4, max_seq_len)


def test_groups_have_as_many_layers_as_the_rarest_window() -> None:
    found = windows_of([layers(*([8] * 5 + [0]) * 4 + [8, 8])])
    assert found == (0, *[8] * 6)
    short = windows_of([layers(*([8] * 5 + [0]) * 4 + [8, 8])], max_seq_len=12)
    assert short == (0,), "no sequence is long enough to pass more than it would take"
    assert windows_of([layers(0, 0, 0)]) == (0,)
    assert windows_of([layers(8, 8)]) == (8,)
    few = windows_of([layers(0, *[8] * 31)])
    assert few == (0, *[8] * 8), "a few groups, though most of the first one is of no use"


def test_stages_have_groups_by_the_layers_of_all() -> None:
    of_all = layers(*([8] * 5 + [0]) * 4 + [8, 8])
    stages = [of_all[:13], of_all[13:]]
    assert windows_of(stages) == (0, *[8] * 6)
    assert windows_of([layers(0, 0), layers(8, 8)]) == (0,), "blocks of windows would be of no use in the first one"
    assert windows_of([layers(8, 8), ()]) == (8,)
    for own in (*stages, ()):
        shape = StateShape(specs=own, block_size=4, windows=(0, *[8] * 6))
        assert shape.block_bytes == (2 * 4 * of_all[0].num_bytes if own else 0)
        assert all(spec.window == shape.windows[placing.group] for spec, placing in shape.placed)


def test_layers_of_another_kind_have_places_of_their_own() -> None:
    """Those of a draft model."""
    narrow = tuple(replace(spec, tensors=spec.tensors[:1]) for spec in layers(0, 9, 20))
    shape = StateShape(specs=(*layers(8, 0, 8), *narrow), block_size=4, windows=(0, 8, 8, 16))
    assert [placing.group for _, placing in shape.placed] == [1, 0, 2, 0, 3, 0]
    assert len({(placing.group, placing.place) for _, placing in shape.placed}) == 6
    assert shape.block_bytes == 4 * (layers(0)[0].num_bytes + 2 * narrow[0].num_bytes)
    assert windows_of([(*layers(*[8] * 3, 0), *narrow[:1])]) == (0, 8, 8, 8)
    assert windows_of([(*layers(8, 8), *narrow[:1])]) == (0, 8, 8), "the draft model alone sees all tokens"


def test_layers_of_a_group_have_memory_of_their_own() -> None:
    specs = layers(8, 8, 0, 8, 8, 0, 8)
    shape = StateShape(specs=specs, block_size=4, windows=(0, 8, 8, 8))
    store = StateStore(shape, 10, torch.device("cpu"))
    places = {(state.group, state["keys"].data_ptr()) for state in store.states}
    assert len(places) == len(specs)
    assert [state.group for state in store.states if state.group] == [1, 2, 3, 1, 2]
    assert [spec.window for spec, state in zip(specs, store.states, strict=True) if not state.group] == [0, 0]
    assert store.num_bytes == 11 * shape.block_bytes == 11 * 2 * 4 * specs[0].num_bytes


def requests(prompts: list[list[int]], max_tokens: int, *, draft_len: int = 0, count: int = 1) -> list[Request]:
    return [
        Request(
            request_id=number,
            input_token_ids=prompt,
            max_tokens=max_tokens,
            sampling_config=SamplingConfig(),
            num_return_sequences=count,
            ngram_config=NGramDecodingConfig(max_draft_len=draft_len, max_matching_ngram_size=2),
        )
        for number, prompt in enumerate(prompts)
    ]


def prompts_of(checkpoint: TinyCheckpoint, num_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that begin alike, and what transformers makes of them."""
    stem = make_prompt(34, seed=3)
    prompts = [stem, [*stem[:30], 7, 8], [*stem[:13], 9], make_prompt(41, seed=4), [*stem, *make_prompt(5, seed=5)]]
    return prompts, [checkpoint.expected(prompt, num_tokens) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_compiler if name in COMPILED_CONFIGS else ()) for name in WINDOWS]
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In chunks, beside others, paused, with drafts, from cached prefixes and from host memory, several at a time."""
    checkpoint = make_checkpoint(tmp_path, name)
    prompts, expected = prompts_of(checkpoint, 12)
    engine = Engine(
        checkpoint.folder,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        num_blocks=10 if len(WINDOWS[name]) == 1 else 22,
        max_num_tokens=16,
        kv_cache_host_memory_bytes=1 << 16,
        cpu_compile=str(name in COMPILED_CONFIGS).lower(),
    )
    assert engine.runner.windows == WINDOWS[name]
    for options in ({}, {"draft_len": 3}, {"count": 2}, {}):
        engine.results.clear()
        engine.serve(requests(prompts, 12, **options))
        for number, tokens in enumerate(expected):
            assert all(engine.tokens(number, index) == tokens for index in range(options.get("count", 1)))
    assert engine.num_paused and engine.kv_cache.num_reused_blocks and engine.kv_cache.num_onboarded_blocks
    engine.runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_a_sequence_holds_what_its_windows_need(name: str, tmp_path: Path) -> None:
    folder, windows = make_checkpoint(tmp_path, name).folder, WINDOWS[name]
    engine = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=64, max_num_tokens=8)
    used: list[int] = []
    allocate = engine.kv_cache.allocate_slots

    def watched(*arguments: Any) -> list[int] | None:
        found = allocate(*arguments)
        used.append(engine.kv_cache.num_used_blocks)
        return found

    engine.kv_cache.allocate_slots = watched  # type: ignore[method-assign]
    length = MAX_SEQ_LEN - 1
    engine.serve(requests([make_prompt(20, seed=6)], length - 20))
    of_all, of_window = -(-length // BLOCK_SIZE), -(-(WINDOW - 1) // BLOCK_SIZE) + 1
    assert used[-1] <= sum(of_window if window else of_all for window in windows) < len(windows) * of_all
    assert engine.kv_cache.num_used_blocks == 0
    engine.runner.close()
