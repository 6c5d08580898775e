"""Two ranks, two processes: the collectives, and the same greedy tokens as transformers on one.

Run: pytest ci/unit/distributed/test_tensor_parallel.py
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_checkpoints import write_awq_checkpoint
from fp8_checkpoints import BLOCK_CONFIG, write_fp8_checkpoint
from model_driver import Driver, Work
from rank_processes import PipeGroup, run_on_two_ranks
from tiny_checkpoints import CONFIGS, make_checkpoint, make_prompt, write_checkpoint

from inflight.config import EngineConfig
from inflight.distributed.mapping import Mapping
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.runtime.model_runner import ModelRunner
from inflight_kernels.cpu import library

pytestmark = pytest.mark.slow

NAMES = [
    *("llama-tied", "llama-biases", "llama-one-kv-head", "mistral-window", "qwen2", "qwen3-biases"),
    *("phi3-partial-window", "granite-biases", "qwen3-moe", "mixtral-window", "qwen2-moe", "glm4-moe"),
    *("gemma3", "cohere2", "phi", "gpt-neox", "gpt2", "opt", "glm4", "gpt-oss"),
    *("deepseek-v2", "deepseek-v3", "qwen3_5", "qwen3-next", "lfm2", "nemotron-h", "nemotron-3"),
    *("falcon-h1", "kimi-linear", "olmo2", "minimax-m2", "bamba", "granite-hybrid-moe", "gemma4", "gemma4-experts"),
]
EXPERTS_APART = [
    *("mixtral-window", "qwen3-moe", "qwen2-moe", "glm4-moe", "deepseek-v2", "deepseek-v3", "nemotron-3"),
    *("gemma4-experts", "minimax-m2", "kimi-linear"),
]
"""Those of which each rank has whole experts, too."""
LENGTHS = (1, 8, 21)
NUM_TOKENS = 16
Expected = tuple[Path, dict[str, Any], list[tuple[list[int], list[int]]]]
"""A checkpoint, options of the engine, and prompts, each with what transformers makes of it."""
COLLECTIVES = {
    "sum": [[12.0, 14.0], [16.0, 18.0]],
    "sum in order": [[12.0, 14.0], [16.0, 18.0]],
    "sum of bfloat16": [[12.0, 14.0], [16.0, 18.0]],
    "side by side": [[1.0, 2.0, 11.0, 12.0], [3.0, 4.0, 13.0, 14.0]],
    "smallest": 6,
    "left behind": [],
}
"""What `use_collectives` must give on every rank."""


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        gpt_model_path=str(folder),
        device="cpu",
        tensor_parallel_size=2,
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=64,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=options.pop("max_tokens_in_paged_kv_cache", 512),
        **options,
    )


def use_collectives(rank_group: RankGroup, temporary: str, several_hosts: bool = False) -> dict[str, Any]:
    tempfile.tempdir = temporary
    cpu = torch.device("cpu")
    rank_group.several_hosts = several_hosts
    groups = ParallelGroups.create(rank_group, Mapping(2), cpu)
    group, torch_groups = groups.tensor, groups.torch_groups
    assert torch_groups is not None
    in_order = TensorParallelGroup.create(rank_group, Mapping(2), cpu, torch_groups, sums_in_order=True)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank_group.rank
    result = {
        "sum": group.all_reduce(x.clone()).tolist(),
        "sum in order": in_order.all_reduce(x.clone()).tolist(),
        "sum of bfloat16": group.all_reduce(x.bfloat16()).float().tolist(),
        "side by side": group.all_gather(x).tolist(),
        "smallest": group.all_reduce_min(7 - rank_group.rank),
        "rank": group.rank,
        "group": type(group).__name__,
    }
    rank_group.barrier()
    result["left behind"] = os.listdir(temporary)
    groups.close()
    return result


Case = tuple[Path, dict[str, Any], list[list[int]]]
"""A checkpoint, options of the engine, and prompts."""


def generate(rank_group: PipeGroup, cases: list[Case]) -> list[list[list[int]]]:
    """Greedy continuations of each checkpoint's prompts: they join one after the other, in chunks, one pauses."""
    outputs = []
    for folder, options, prompts in cases:
        runner = ModelRunner.load(config(folder, **options), rank_group)
        works = [Work(prompt=prompt, max_tokens=NUM_TOKENS, arrives=2 * i, chunk=9) for i, prompt in enumerate(prompts)]
        works[2].pauses_at = 5
        outputs.append(Driver(runner).run(works))
        rank_group.barrier()
        runner.close()
    return outputs


def round_keys(rank_group: RankGroup, folder: Path, kv_cache_dtype: str) -> tuple[list[int], list[float], int]:
    """With a KV cache of 8 bits, on as many ranks as there are: tokens and log probabilities of a prompt in chunks, and
    the bytes of a rank's keys of a block in the first layer."""
    options = config(folder, deterministic=True, kv_cache_dtype=kv_cache_dtype)
    runner = ModelRunner.load(replace(options, tensor_parallel_size=rank_group.size), rank_group)
    work = Work(prompt=make_prompt(21), max_tokens=NUM_TOKENS, chunk=9, log_probs=True)
    Driver(runner).run([work])
    rank_group.barrier()
    runner.close()
    return work.output, work.output_log_probs, runner._store.states[0]["keys"][0].nbytes


def compute_in_batches(
    rank_group: RankGroup, folder: Path, options: dict[str, Any]
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities of a prompt alone, and in other chunks beside others."""
    runner = ModelRunner.load(config(folder, moe_expert_parallel_size=2, **options), rank_group)
    works = [Work(prompt=make_prompt(21), max_tokens=NUM_TOKENS, chunk=chunk, log_probs=True) for chunk in (9, 4)]
    others = [Work(prompt=make_prompt(length), max_tokens=NUM_TOKENS, arrives=length // 4) for length in (3, 12)]
    Driver(runner).run(works[:1])
    Driver(runner).run([works[1], *others])
    rank_group.barrier()
    runner.close()
    return [(work.output, work.output_log_probs) for work in works]


def count_blocks(rank_group: PipeGroup, folder: Path) -> int:
    """Of ranks that could hold different numbers of blocks."""
    tokens = 400 if rank_group.rank == 0 else 300
    runner = ModelRunner.load(config(folder, max_tokens_in_paged_kv_cache=tokens), rank_group)
    rank_group.barrier()
    runner.close()
    return runner.num_blocks


def refusal(rank_group: PipeGroup, folder: Path, **options: Any) -> str:
    try:
        ModelRunner.load(config(folder, **options), rank_group)
    except ConfigurationError as error:
        rank_group.barrier()
        return str(error)
    return ""


def run_all(
    rank_group: PipeGroup, temporary: str, cases: list[Case], unsplittable: list[tuple[Path, dict[str, Any]]]
) -> dict[str, Any]:
    return {
        "collectives": use_collectives(rank_group, temporary),
        "outputs": generate(rank_group, cases),
        "rounded": {each: round_keys(rank_group, cases[0][0], each) for each in ("fp8", "int8")},
        "num_blocks": count_blocks(rank_group, cases[0][0]),
        "refusals": [refusal(rank_group, folder, **options) for folder, options in unsplittable],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two-ranks")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Expected]:
    """Checkpoint folders, each with options, prompts and what transformers makes of them."""
    checkpoints = [make_checkpoint(folder / name, name) for name in NAMES]
    checkpoints.append(write_awq_checkpoint(folder / "awq"))
    checkpoints.append(write_fp8_checkpoint(folder / "fp8", num_ranks=2))
    # Tokens of static scales, and of those of blocks, do not depend on the number of ranks.
    checkpoints.append(write_fp8_checkpoint(folder / "static-fp8", static=True))
    checkpoints.append(write_fp8_checkpoint(folder / "fp8-blocks", strategy="block", config=BLOCK_CONFIG))
    pairs = [(c.folder, [c.prompt(length, NUM_TOKENS) for length in LENGTHS]) for c in checkpoints]
    apart = {"moe_expert_parallel_size": 2}
    even = deepcopy(CONFIGS["gpt-oss"])
    even.num_local_experts = 6
    gpt_oss = write_checkpoint(folder / "gpt-oss-even", even, 1)
    of_gpt_oss = [gpt_oss.prompt(length, NUM_TOKENS) for length in LENGTHS]
    return [
        *((path, {}, prompts) for path, prompts in pairs),
        *((path, apart, prompts) for path, prompts in pairs if path.name in EXPERTS_APART),
        (gpt_oss.folder, apart, of_gpt_oss),
    ]


@pytest.fixture(scope="module")
def answers(folder: Path, expected: list[Expected]) -> list[dict[str, Any]]:
    """Of both ranks. Starting them takes longest, so they do everything in one life."""
    cases = [(checkpoint, options, [prompt for prompt, _ in pairs]) for checkpoint, options, pairs in expected]
    temporary = folder / "temporary"
    temporary.mkdir()
    three_groups = deepcopy(CONFIGS["nemotron-h"])
    three_groups.mamba_num_heads, three_groups.n_groups = 6, 3
    unsplittable = [
        (make_checkpoint(folder / "three-heads", "llama-three-heads").folder, {}),
        (write_checkpoint(folder / "three-groups", three_groups, 1).folder, {}),
        (folder / "gpt-oss", {"moe_expert_parallel_size": 2}),
        (folder / "qwen2", {"moe_expert_parallel_size": 2}),
    ]
    return run_on_two_ranks(run_all, str(temporary), cases, unsplittable)


@pytest.mark.skipif(not library._find_compiler(), reason="there is no C++ compiler")
def test_collectives(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        assert answer["collectives"] == {**COLLECTIVES, "rank": rank, "group": "SharedMemoryTensorParallelGroup"}


def test_collectives_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for rank, answer in enumerate(run_on_two_ranks(use_collectives, str(tmp_path))):
        assert answer == {**COLLECTIVES, "rank": rank, "group": "TorchTensorParallelGroup"}


def use_collectives_in_own_pid_namespaces(rank_group: RankGroup, temporary: str, pids: list[int]) -> list[Any]:
    """As in containers that share the host's files but not its process ids: the leader's id means something else."""
    answers = []
    for pid in pids:
        if rank_group.rank == 0:
            os.getpid = lambda pid=pid: pid  # type: ignore[misc]
        answers.append(use_collectives(rank_group, temporary))
    return answers


@pytest.mark.skipif(not library._find_compiler(), reason="there is no C++ compiler")
def test_collectives_of_ranks_that_do_not_see_each_others_processes(tmp_path: Path) -> None:
    # No process has the first id: the largest that Linux gives is one less. This process has the second one, and other
    # files open.
    pids = [2**22, os.getpid()]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with contextlib.ExitStack() as files:
        for number in range(100):
            files.enter_context((tmp_path / f"file{number}").open("w"))
        answers = run_on_two_ranks(use_collectives_in_own_pid_namespaces, str(temporary), pids)
    for rank, answer in enumerate(answers):
        assert answer == [{**COLLECTIVES, "rank": rank, "group": "TorchTensorParallelGroup"}] * len(pids)
    assert not any((tmp_path / f"file{number}").stat().st_size for number in range(100))


def test_collectives_between_hosts(tmp_path: Path) -> None:
    """The way ranks on several hosts meet: through a store on the leader's address."""
    for rank, answer in enumerate(run_on_two_ranks(use_collectives, str(tmp_path), True)):
        assert answer == {**COLLECTIVES, "rank": rank, "group": "TorchTensorParallelGroup"}


def test_two_ranks_give_the_same_tokens_as_transformers(
    answers: list[dict[str, Any]], expected: list[Expected]
) -> None:
    assert len(expected) - len({path for path, _, _ in expected}) == len(EXPERTS_APART)
    for answer in answers:
        assert answer["outputs"] == [[tokens for _, tokens in pairs] for _, _, pairs in expected]


@pytest.mark.parametrize("options", [{"deterministic": True}, {"cpu_compile": "true"}], ids=["torch", "C++"])
def test_with_whole_experts_bits_depend_on_no_neighbour(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4-moe-wide").folder
    (first, second) = run_on_two_ranks(compute_in_batches, folder, options)
    assert first == second and first[0] == first[1]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_ranks_store_their_heads_in_8_bits(
    kv_cache_dtype: str,
    answers: list[dict[str, Any]],
    expected: list[Expected],
) -> None:
    tokens, log_probs, num_bytes = round_keys(SingleRank(), expected[0][0], kv_cache_dtype)
    for answer in answers:
        found = answer["rounded"][kv_cache_dtype]
        assert found == answers[0]["rounded"][kv_cache_dtype] and found[0] == tokens and 2 * found[2] == num_bytes
        # Another order of sums may round a key to the next number.
        assert found[1] == pytest.approx(log_probs, abs=0.1)


def test_ranks_agree_on_the_smallest_number_of_blocks(answers: list[dict[str, Any]]) -> None:
    assert [answer["num_blocks"] for answer in answers] == [75, 75]


def test_what_does_not_split_is_refused(answers: list[dict[str, Any]], folder: Path) -> None:
    for answer in answers:
        assert answer["refusals"] == [
            "tensor_parallel_size 2 does not divide the checkpoint's num_attention_heads (3)",
            "tensor_parallel_size 2 does not divide the checkpoint's Mamba groups (3)",
            "moe_expert_parallel_size 2 does not divide the checkpoint's number of experts (5)",
            f"moe_expert_parallel_size is 2, but Qwen2ForCausalLM of {folder / 'qwen2'} has no experts; set "
            "moe_expert_parallel_size to 1",
        ]


def test_a_group_of_one_exchanges_nothing() -> None:
    group = ParallelGroups.create(SingleRank(), Mapping(), torch.device("cpu")).tensor
    x = torch.ones(2, 3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.all_reduce_min(5) == 5
