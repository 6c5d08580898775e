"""Pipeline stages, each a process or two: the same tokens as transformers on one.

Run: pytest ci/unit/distributed/test_pipeline.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from awq_checkpoints import write_awq_checkpoint
from fp8_checkpoints import write_fp8_checkpoint
from harness import make_request
from network_engine import Engine
from rank_processes import PipeGroup, run_on_ranks
from tiny_checkpoints import CONFIGS, make_checkpoint, make_prompt, write_checkpoint

from inflight.config import EngineConfig, SchedulerPolicy
from inflight.distributed.mapping import Mapping
from inflight.distributed.pipeline import PipelineGroup
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.models.pipeline_stage import layers_of_stage
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.step_handle import StepHandle, StepResult
from inflight.scheduler_output import RowWork, SchedulerOutput

pytestmark = pytest.mark.slow

NAMES = [
    *("llama-tied", "llama-biases", "llama-one-kv-head", "mistral-window", "qwen2", "qwen3-biases"),
    *("phi3-partial-window", "granite-biases", "qwen3-moe", "gemma2", "olmo2", "gpt2", "cohere", "gpt-oss"),
    *("qwen3_5", "deepseek-v2"),
]
WITH_WINDOWS = {"mistral-window": (11,), "gemma2": (0, 11), "gpt-oss": (0, 11)}
"""Some of NAMES, and the windows of their groups of layers on two stages."""
LENGTHS = (1, 8, 21)
NUM_TOKENS = 16
PATIENCE = 120
"""Seconds after which something that should happen counts as never happening."""
Cases = list[tuple[Path, list[tuple[list[int], list[int]]]]]
"""Checkpoint folders, each with prompts and what transformers makes of them."""


# -- networks ----------------------------------------------------------------------------------------------------------


def make_engine(folder: Path, rank_group: PipeGroup | SingleRank, mapping: Mapping, **options: Any) -> Engine:
    usual = {"num_blocks": 96, "max_num_tokens": 24, "policy": SchedulerPolicy.GUARANTEED_NO_EVICT}
    return Engine(
        folder,
        rank_group=rank_group,
        tensor_parallel_size=mapping.tp,
        pipeline_parallel_size=mapping.pp,
        num_threads=1,
        **{**usual, **options},
    )


def generate(rank_group: PipeGroup, mapping: Mapping, cases: Cases) -> list[list[list[int]]]:
    """Greedy continuations of each checkpoint's prompts, all at once and in chunks."""
    outputs = []
    for folder, pairs in cases:
        engine = make_engine(folder, rank_group, mapping)
        engine.serve([make_request(number, prompt, NUM_TOKENS) for number, (prompt, _) in enumerate(pairs, 1)])
        outputs.append([engine.tokens(number) for number in range(1, len(pairs) + 1)])
        rank_group.barrier()
        engine.runner.close()
    return outputs


PAUSED = [make_request(number, [number, 5, 9, *range(number)], 30) for number in range(1, 5)]


def pause(rank_group: PipeGroup | SingleRank, mapping: Mapping, folder: Path) -> tuple[list[list[int]], int]:
    """The tokens of requests that do not all fit into the KV cache, and how often one was paused."""
    engine = make_engine(folder, rank_group, mapping, num_blocks=20, policy=SchedulerPolicy.MAX_UTILIZATION)
    engine.serve(PAUSED)
    rank_group.barrier()
    engine.runner.close()
    return [engine.tokens(request.request_id) for request in PAUSED], engine.num_paused


def round_keys(
    rank_group: PipeGroup | SingleRank, mapping: Mapping, folder: Path, kv_cache_dtype: str = "fp8"
) -> tuple[list[int], list[float], int]:
    """Tokens and log probabilities of a prompt in chunks, and the bytes of a block in the first layer of a stage."""
    engine = make_engine(
        folder, rank_group, mapping, max_num_tokens=8, deterministic=True, kv_cache_dtype=kv_cache_dtype
    )
    engine.serve([make_request(1, make_prompt(21), NUM_TOKENS, log_probs=True)])
    rank_group.barrier()
    engine.runner.close()
    return engine.tokens(1), engine.log_probs(1), engine.runner._store.states[0]["keys"][0].nbytes


def start_on_snapshots(
    rank_group: PipeGroup | SingleRank, mapping: Mapping, folder: Path
) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Of a network with states of sequences: tokens of several sequences of a prompt, of beams, and of prompts that
    begin alike, whose blocks went to the host meanwhile; and how many blocks were not computed again."""
    engine = make_engine(folder, rank_group, mapping, num_blocks=48, kv_cache_host_memory_bytes=2**20)
    prompt = make_prompt(21)
    engine.serve([make_request(1, prompt, 12, num_return_sequences=3, seed=4)])
    engine.serve([make_request(2, make_prompt(40, seed=1), 20), make_request(3, make_prompt(40, seed=2), 20)])
    engine.serve([make_request(4, prompt, 12, beam_width=2), make_request(5, [*prompt, 7], 12)])
    rank_group.barrier()
    engine.runner.close()
    return {key: engine.tokens(*key) for key in engine.results}, engine.kv_cache.num_reused_blocks


def pass_windows(
    rank_group: PipeGroup | SingleRank, mapping: Mapping, folder: Path
) -> tuple[list[list[int]], tuple[int, ...], bool]:
    """Of a network with windows: tokens of prompts that begin alike; the windows of its groups of layers; and whether
    it had so few blocks that some were paused and blocks came back from the host."""
    engine = make_engine(
        folder,
        rank_group,
        mapping,
        num_blocks=11,
        max_num_tokens=16,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        kv_cache_host_memory_bytes=2**20,
    )
    stem = make_prompt(34, seed=3)
    prompts = [stem, [*stem[:30], 7, 8], [*stem[:13], 9], make_prompt(41, seed=4), [*stem, 5, 6, 7]]
    for first in (0, 10):
        engine.serve([make_request(first + number, prompt, 12) for number, prompt in enumerate(prompts)])
    rank_group.barrier()
    engine.runner.close()
    tokens = [engine.tokens(first + number) for first in (0, 10) for number in range(len(prompts))]
    is_short = engine.num_paused > 0 and engine.kv_cache.num_onboarded_blocks > 0
    return tokens, engine.runner.windows, is_short and not engine.kv_cache.num_used_blocks


def count_blocks(rank_group: PipeGroup, mapping: Mapping, folder: Path) -> int:
    """Of ranks that could hold different numbers of blocks."""
    engine = make_engine(folder, rank_group, mapping, num_blocks=90 - 10 * rank_group.rank)
    rank_group.barrier()
    engine.runner.close()
    return engine.runner.num_blocks


def overlap(rank_group: PipeGroup, mapping: Mapping, folder: Path) -> list[list[int]]:
    """The rows of each step, where the last stage finishes some steps only once it has the hidden states of the next.
    If the first stage waited for a step's results before it computed the next one, none would come."""
    engine = make_engine(folder, rank_group, mapping)
    runner, rows = engine.runner, []
    forward, sample = runner.forward, runner._computation.sample

    def noting(scheduled: SchedulerOutput) -> StepHandle:
        rows.append([work.row for work in scheduled.rows])
        return forward(scheduled)

    def waiting(*arguments: Any) -> StepResult:
        link = runner._groups.pipeline._before
        waiting.num_calls += 1
        if 2 <= waiting.num_calls <= 8:
            deadline = time.monotonic() + PATIENCE
            while not link._frames:
                assert time.monotonic() < deadline, "the next step does not come"
                time.sleep(0.001)
        return sample(*arguments)

    waiting.num_calls = 0
    runner.forward, runner._computation.sample = noting, waiting
    engine.serve([make_request(number, [number, 7], NUM_TOKENS) for number in range(1, 5)])
    rank_group.barrier()
    runner.close()
    return rows


def refusals(rank_group: PipeGroup, mapping: Mapping, folder: Path) -> list[str]:
    """What a rank says to a step with a token that only the last stage knows."""
    engine = make_engine(folder, rank_group, mapping)
    unknown = SchedulerOutput(new_sequences=[], rows=[RowWork(row=0, start=3, num_tokens=1)])
    with pytest.raises(ValueError, match="only the last pipeline stage knows") as refusal:
        engine.runner.forward(unknown)
    rank_group.barrier()
    engine.runner.close()
    return [str(refusal.value)]


def run_all(rank_group: PipeGroup, mapping: Mapping, cases: Cases, apart: Sequence[Path] = ()) -> dict[str, Any]:
    """Starting ranks takes longest, so they do everything in one life."""
    folder, folders = cases[0][0], {each.name: each for each, _ in cases}
    found: dict[str, Any] = {"outputs": generate(rank_group, mapping, cases)}
    if mapping.tp == 1:
        found["num_blocks"] = count_blocks(rank_group, mapping, folder)
        found["rows"] = overlap(rank_group, mapping, folder)
        found["refusals"] = refusals(rank_group, mapping, folder)
        found["fp8"] = round_keys(rank_group, mapping, folder)
        found["paused"], found["num_paused"] = pause(rank_group, mapping, folder)
        found["windows"] = [pass_windows(rank_group, mapping, folders[name]) for name in WITH_WINDOWS]
        found["snapshots"] = [start_on_snapshots(rank_group, mapping, one) for one in apart]
    return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = tmp_path_factory.mktemp("stages")
    checkpoints = [make_checkpoint(folder / name, name) for name in NAMES]
    checkpoints += [write_awq_checkpoint(folder / "awq"), write_fp8_checkpoint(folder / "fp8")]
    return [(c.folder, [c.prompt(length, NUM_TOKENS) for length in LENGTHS]) for c in checkpoints]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Networks of which one stage keeps states of sequences alone, and the other one keys and values alone."""
    folder, folders = tmp_path_factory.mktemp("apart"), []
    for kinds in (["linear_attention"] * 2 + ["full_attention"], ["full_attention"] * 2 + ["linear_attention"]):
        config = deepcopy(CONFIGS["qwen3_5"])
        config.layer_types = kinds
        folders.append(write_checkpoint(folder / kinds[0], config, 1).folder)
    return folders


@pytest.fixture(scope="module")
def answers(cases: Cases, apart: list[Path]) -> list[dict[str, Any]]:
    """Of both ranks of two stages, which have two layers and one."""
    return run_on_ranks(2, run_all, Mapping(1, 2), cases, apart)


def test_stages_may_keep_states_of_different_kinds(answers: list[dict[str, Any]], apart: list[Path]) -> None:
    for number, folder in enumerate(apart):
        expected, num_reused = start_on_snapshots(SingleRank(), Mapping(), folder)
        assert num_reused > 10
        assert [answer["snapshots"][number] for answer in answers] == [(expected, num_reused)] * 2


def test_two_stages_give_the_same_tokens_as_transformers(answers: list[dict[str, Any]], cases: Cases) -> None:
    for answer in answers:
        assert answer["outputs"] == [[tokens for _, tokens in pairs] for _, pairs in cases]


def test_two_stages_of_two_ranks_give_the_same_tokens_as_transformers(cases: Cases) -> None:
    # Two ranks alone and two stages alone compute all of them. Tokens of fp8 depend on the number of ranks.
    some = cases[:-1:3]
    for answer in run_on_ranks(4, run_all, Mapping(2, 2), some):
        assert answer["outputs"] == [[tokens for _, tokens in pairs] for _, pairs in some]


def test_stages_compute_different_sequences_at_once(answers: list[dict[str, Any]]) -> None:
    first, *steps = answers[0]["rows"]
    assert answers[1]["rows"] == answers[0]["rows"]
    assert sorted(first) == [0, 1, 2, 3]
    assert [sorted(rows) for rows in steps[:8]] == [[0, 1], [2, 3]] * 4


def test_stages_agree_on_the_smallest_number_of_blocks(answers: list[dict[str, Any]]) -> None:
    assert [answer["num_blocks"] for answer in answers] == [80, 80]


def test_stages_pass_windows_together(answers: list[dict[str, Any]], cases: Cases) -> None:
    folders = {each.name: each for each, _ in cases}
    for number, (name, windows) in enumerate(WITH_WINDOWS.items()):
        tokens, *_ = pass_windows(SingleRank(), Mapping(), folders[name])
        assert [answer["windows"][number] for answer in answers] == [(tokens, windows, True)] * 2


def test_stages_must_be_told_every_token(answers: list[dict[str, Any]]) -> None:
    assert all(answer["refusals"] for answer in answers)


def test_paused_sequences_go_on_in_all_stages(answers: list[dict[str, Any]], cases: Cases) -> None:
    expected, num_paused = pause(SingleRank(), Mapping(), cases[0][0])
    assert num_paused
    for answer in answers:
        assert answer["num_paused"]
        assert answer["paused"] == expected


def test_all_stages_store_fp8(answers: list[dict[str, Any]], cases: Cases) -> None:
    expected = round_keys(SingleRank(), Mapping(), cases[0][0])
    assert [answer["fp8"] for answer in answers] == [expected] * 2
    _, exact_log_probs, block_bytes = round_keys(SingleRank(), Mapping(), cases[0][0], "auto")
    assert exact_log_probs != expected[1] and block_bytes == 4 * expected[2]


# -- how layers are distributed, and what is refused -------------------------------------------------------------------


class Stage(PipelineGroup):
    def __init__(self, stage: int, size: int) -> None:
        self.stage, self.size = stage, size


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(4, [1, 1, 1, 1]), (6, [2, 2, 1, 1]), (30, [8, 8, 7, 7]), (80, [20] * 4)]
)
def test_earlier_stages_have_a_layer_more(num_layers: int, expected: list[int]) -> None:
    stages = [layers_of_stage(num_layers, Stage(stage, 4)) for stage in range(4)]
    assert [len(layers) for layers in stages] == expected
    assert [number for layers in stages for number in layers] == list(range(num_layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size 4 is more than the checkpoint's 3 layers"):
        layers_of_stage(3, Stage(0, 4))


def test_transformers_code_has_no_stages(tmp_path: Path) -> None:
    import transformers_checkpoints  # which rank processes need not import

    folder = write_checkpoint(tmp_path, transformers_checkpoints.CONFIGS["gpt2"], 1).folder
    config = EngineConfig(gpt_model_path=str(folder), device="cpu", model_impl="transformers", pipeline_parallel_size=2)
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size is 2, but transformers' modelling code"):
        ModelRunner.load(config, SingleRank())


def test_a_draft_model_has_no_stages() -> None:
    with pytest.raises(ConfigurationError, match="speculative_model_dir: a draft model does not run on"):
        EngineConfig(pipeline_parallel_size=2, speculative_model_dir="somewhere")
