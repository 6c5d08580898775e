"""Greedy tokens of transformers' modelling code with paged attention equal its own, for many classes; and classes that
cannot be served are refused with the reason, before anything is served.

Run: pytest ci/unit/test_transformers_decoder.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from model_driver import Driver, Work
from tiny_checkpoints import TinyCheckpoint, make_prompt, write_checkpoint
from transformers import PreTrainedConfig
from transformers_checkpoints import CONFIGS, EXPERTS, GEMMA, GPT2, LONGROPE, make_config

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.models.decoder import Decoder
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.runtime.model_runner import ModelRunner

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
BLOCK_SIZE = 4
NUM_TOKENS = 16


def config_of(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "max_seq_len": 100,
        "tokens_per_block": BLOCK_SIZE,
        "max_tokens_in_paged_kv_cache": 1024,
        "num_threads": 1,
    }
    return EngineConfig(gpt_model_path=str(folder), **{**defaults, **options})


def load(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(config_of(folder, **options), SingleRank())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}").removeprefix("/config.json").removeprefix(": ")


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], len(request.param))


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    runner = load(checkpoint.folder, device=device)
    assert isinstance(runner._decoder, TransformersDecoder)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def pairs(checkpoint: TinyCheckpoint) -> list[tuple[list[int], list[int]]]:
    """Prompts and what transformers makes of them; longer than the windows."""
    pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 6, 21, 33)]
    assert len({tuple(tokens) for _, tokens in pairs}) == len(pairs)
    return pairs


def works(pairs: list[tuple[list[int], list[int]]], **options: Any) -> list[Work]:
    return [Work(prompt=prompt, max_tokens=NUM_TOKENS, **options) for prompt, _ in pairs]


def expected(pairs: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    return [tokens for _, tokens in pairs]


def test_alone(runner: ModelRunner, pairs: list[tuple[list[int], list[int]]]) -> None:
    outputs = [Driver(runner).run([work])[0] for work in works(pairs)]
    assert outputs == expected(pairs)


def test_in_a_mixed_batch_in_chunks(runner: ModelRunner, pairs: list[tuple[list[int], list[int]]]) -> None:
    batch = works(pairs, chunk=7)
    for place, work in enumerate(batch):
        work.arrives = 2 * place
    assert Driver(runner).run(batch) == expected(pairs)


def test_after_a_pause(runner: ModelRunner, pairs: list[tuple[list[int], list[int]]]) -> None:
    batch = works(pairs)
    batch[1].pauses_at = batch[3].pauses_at = 5
    assert Driver(runner).run(batch) == expected(pairs)


def test_with_a_shared_prefix(runner: ModelRunner, pairs: list[tuple[list[int], list[int]]]) -> None:
    prompt, tokens = pairs[2]
    first = Work(prompt=prompt[: 4 * BLOCK_SIZE] + make_prompt(5, seed=1), max_tokens=NUM_TOKENS)
    second = Work(prompt=prompt, max_tokens=NUM_TOKENS, arrives=4, shares=first, shared_blocks=4)
    Driver(runner).run([first, second])
    assert second.output == tokens


def test_to_the_last_position(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """The step that overlap has launched beyond the end disturbs nobody, not even where positions are learnt."""
    full, full_tokens = checkpoint.prompt(96, 4)
    other, other_tokens = checkpoint.prompt(9, 12)
    batch = [Work(prompt=full, max_tokens=5), Work(prompt=other, max_tokens=12)]
    Driver(runner).run(batch)
    assert (batch[0].output[:4], batch[1].output) == (full_tokens, other_tokens)


def test_learnt_positions_end_where_the_table_ends(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_config("gpt2", **{**GPT2, "n_positions": 32}), 1)
    runner = load(tmp_path, max_seq_len=0)
    assert runner.limits.max_seq_len == 32
    prompt, tokens = checkpoint.prompt(28, 4)
    work = Work(prompt=prompt, max_tokens=5)
    Driver(runner).run([work])
    runner.close()
    assert work.output[:4] == tokens


@pytest.mark.parametrize("name", ["llama-llama3", "mistral-window", "qwen2-window", "qwen3-biases"])
def test_a_native_family_gives_the_same_tokens_both_ways(tmp_path: Path, name: str) -> None:
    checkpoint = tiny_checkpoints.make_checkpoint(tmp_path, name)
    pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (5, 30)]
    for model_impl, kind in (("transformers", TransformersDecoder), ("native", Decoder), ("auto", Decoder)):
        runner = load(tmp_path, model_impl=model_impl)
        assert isinstance(runner._decoder, kind)
        assert Driver(runner).run(works(pairs, chunk=7)) == expected(pairs)
        runner.close()


def test_both_ways_declare_the_same_caches(tmp_path: Path) -> None:
    tiny_checkpoints.make_checkpoint(tmp_path, "qwen3-window")
    specs = []
    for model_impl in ("native", "transformers"):
        runner = load(tmp_path, model_impl=model_impl)
        specs.append(runner._decoder.cache_specs)
        runner.close()
    assert specs[0] == specs[1]
    assert [spec.sliding_window for spec in specs[0]] == [13, 0, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = write_checkpoint(tmp_path, CONFIGS["gemma3_text"], 1, dtype=dtype)
    runner = load(tmp_path)
    work = Work(prompt=make_prompt(20), max_tokens=6, log_probs=True)
    Driver(runner).run([work])
    runner.close()
    assert {spec.dtype for spec in runner._decoder.cache_specs} == {dtype}
    with torch.inference_mode():
        logits = checkpoint.model.float()(torch.tensor([work.token_ids])).logits[0]
    reference = logits[19:-1].log_softmax(-1).gather(1, torch.tensor(work.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(work.output_log_probs), reference, rtol=0, atol=0.3)


def test_two_networks_in_one_process(tmp_path: Path) -> None:
    """Steps of both are under way at once, on a thread each."""
    checkpoints = [write_checkpoint(tmp_path / name, CONFIGS[name], 1) for name in ("gpt2", "phi3")]
    runners = [load(checkpoint.folder) for checkpoint in checkpoints]
    pairs = [checkpoint.prompt(9, NUM_TOKENS) for checkpoint in checkpoints]
    drivers = [Driver(runner) for runner in runners]
    batches = [[Work(prompt=prompt, max_tokens=NUM_TOKENS)] for prompt, _ in pairs]
    for _ in range(NUM_TOKENS + 2):
        for driver, batch in zip(drivers, batches, strict=True):
            driver._step([work for work in batch if work.row < 0], [work for work in batch if not work.is_done])
    assert [batch[0].output for batch in batches] == expected(pairs)
    for runner in runners:
        runner.close()


# -- which way, and why ------------------------------------------------------------------------------------------------


def test_the_log_says_which_way_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "gpt2", CONFIGS["gpt2"], 1)
    tiny_checkpoints.make_checkpoint(tmp_path / "llama", "llama")
    caplog.set_level(logging.INFO, "inflight")
    load(tmp_path / "gpt2").close()
    load(tmp_path / "llama").close()
    load(tmp_path / "llama", model_impl="transformers").close()
    told = [record.getMessage() for record in caplog.records if "comput" in record.getMessage()]
    assert told[0].startswith("transformers' modelling code computes GPT2LMHeadModel: ")
    assert "no layers of its own for GPT2LMHeadModel" in told[0]
    assert told[1:] == [
        "the engine's own layers compute LlamaForCausalLM",
        "transformers' modelling code computes LlamaForCausalLM: model_impl is transformers",
    ]


def test_a_native_family_with_a_habit_that_is_not_native_goes_the_other_way(tmp_path: Path) -> None:
    config = make_config("llama", hidden_act="gelu")
    checkpoint = write_checkpoint(tmp_path, config, 1)
    prompt, tokens = checkpoint.prompt(9, NUM_TOKENS)
    runner = load(tmp_path)
    assert Driver(runner).run([Work(prompt=prompt, max_tokens=NUM_TOKENS)]) == [tokens]
    runner.close()
    assert refusal(tmp_path, model_impl="native") == (
        f"model_impl is native, but {tmp_path}/config.json: hidden_act 'gelu' is not supported; only silu is; "
        "set model_impl to auto"
    )


def test_native_is_refused_for_another_family(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["gpt2"], 1)
    sentence = refusal(tmp_path, model_impl="native")
    assert sentence.startswith("model_impl is native, but ") and sentence.endswith("; set model_impl to auto")


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["gpt2"], 1)
    sentence = refusal(tmp_path, tensor_parallel_size=2)
    assert sentence.startswith("tensor_parallel_size is 2, but transformers' modelling code computes GPT2LMHeadModel")
    assert sentence.endswith("set tensor_parallel_size to 1")


def test_layers_in_cpp_are_for_native_networks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, CONFIGS["gpt2"], 1, dtype=torch.bfloat16)
    assert refusal(tmp_path, cpu_compile="true") == (
        "cpu_compile is true, but it is for the engine's own layers, not for transformers' modelling code "
        "(key model_impl); set cpu_compile to auto or false"
    )
    caplog.set_level(logging.INFO, "inflight")
    load(tmp_path).close()
    assert any("the layers run in torch" in record.getMessage() for record in caplog.records)


# -- what cannot be served ---------------------------------------------------------------------------------------------

LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 3,
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "sinks": (make_config("gpt_oss", **EXPERTS), "its attention has sinks, which the kernels do not compute"),
    "soft cap": (make_config("gemma2", **GEMMA), "its attention caps its scores, which the kernels do not compute"),
    "latent": (make_config("deepseek_v3", **LATENT), "its keys have 24 elements a head and its values 16"),
    "own classes": (make_config("gptj", **GPT2, rotary_dim=8), "do not attend through transformers' attention"),
    "recurrent": (make_config("mamba"), "MambaForCausalLM is not"),
    "short convolutions": (
        make_config("lfm2", layer_types=["conv", "full_attention", "conv"], conv_L_cache=3),
        "its layers 0, 2 do not attend through transformers' attention interface",
    ),
    "chunks": (
        make_config("llama4_text", num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=16),
        "its attention mask is neither causal nor a sliding window for 100 positions (it may be for fewer: "
        "key max_seq_len)",
    ),
    "encoder": (make_config("bert"), "its attention sees the tokens that follow"),
    "two attentions a layer": (make_config("diffllama"), "its layer 0 attends more than once"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(tmp_path: Path, name: str) -> None:
    config, reason = REFUSED[name]
    write_checkpoint(tmp_path, config, 1)
    sentence = refusal(tmp_path)
    assert reason in sentence
    assert config.architectures[0] in sentence or config.model_type in sentence.lower()


def test_a_chunk_is_no_obstacle_to_shorter_sequences(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, REFUSED["chunks"][0], 1)
    prompt, tokens = checkpoint.prompt(9, 7)
    runner = load(tmp_path, max_seq_len=16)
    assert Driver(runner).run([Work(prompt=prompt, max_tokens=7)]) == [tokens]
    runner.close()


def test_frequencies_that_follow_the_longest_sequence_limit_its_length(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=40), 1)
    runner = load(tmp_path, max_seq_len=0)
    runner.close()
    assert runner.limits.max_seq_len == 40
    assert refusal(tmp_path, max_seq_len=41) == "max_seq_len 41 is more than the 40 positions that the checkpoint has"
