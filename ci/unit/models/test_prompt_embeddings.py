"""Prompts with embeddings of their own continue as `transformers.generate(inputs_embeds=...)` continues them, float32.

Run: pytest ci/unit/models/test_prompt_embeddings.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_checkpoints
from compiled_network import Network, Step, needs_compiler
from model_driver import Driver, Work
from rank_processes import PipeGroup, run_on_two_ranks
from tiny_checkpoints import (
    SIZES,
    TinyCheckpoint,
    make_checkpoint,
    make_prompt,
    make_table,
    write_checkpoint,
)

from inflight.config import EngineConfig
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.prompt_tuning import EmbeddingTable
from inflight.runtime.model_runner import ModelRunner
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.slow

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
NATIVE = ["llama", "qwen3-biases", "phi3", "granite", "gemma2", "gemma3", "gpt2"]
TRANSFORMERS = ["gemma", "gemma3_text", "granitemoe", "gpt2", "opt"]
"""Gemma and Granite scale embeddings before their first layer, of given ones only the first and the last of these;
GPT-2 and OPT add learnt positions."""
BLOCK_SIZE = 4
NUM_TOKENS = 16
OWN = SIZES["vocab_size"]
"""The first id beyond the vocabulary."""


def load(folder: Path, group: RankGroup | None = None, *, cpu_compile: str = "false", **options: Any) -> ModelRunner:
    config = EngineConfig(
        gpt_model_path=str(folder),
        max_batch_size=8,
        max_num_tokens=256,
        max_seq_len=100,
        tokens_per_block=BLOCK_SIZE,
        max_tokens_in_paged_kv_cache=1024,
        cpu_compile=cpu_compile,
        num_threads=1,
        **options,
    )
    return ModelRunner.load(config, group or SingleRank())


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[*NATIVE, *(f"transformers {name}" for name in TRANSFORMERS)])
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(network: str, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    *through, name = network.split()
    folder = tmp_path_factory.mktemp(name)
    if not through:
        return make_checkpoint(folder, name)
    return write_checkpoint(folder, transformers_checkpoints.CONFIGS[name], len(name))


@pytest.fixture(scope="module")
def runner(network: str, checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    model_impl = "native" if network in NATIVE else "transformers"
    runner = load(checkpoint.folder, device=device, model_impl=model_impl)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def tables(runner: ModelRunner) -> list[EmbeddingTable]:
    return [make_table(rows, runner.limits.embedding_size, seed) for seed, rows in enumerate((1, 7, 30))]


@pytest.fixture(scope="module")
def pairs(checkpoint: TinyCheckpoint, tables: list[EmbeddingTable]) -> list[tuple[list[int], list[int]]]:
    return [checkpoint.prompt(length, NUM_TOKENS, table) for length, table in zip((2, 13, 33), tables, strict=True)]


def works(pairs: list[tuple[list[int], list[int]]], tables: list[EmbeddingTable], **options: Any) -> list[Work]:
    return [
        Work(prompt=prompt, max_tokens=NUM_TOKENS, embedding_table=table, **options)
        for (prompt, _), table in zip(pairs, tables, strict=True)
    ]


def test_in_a_mixed_batch_in_chunks_and_after_a_pause(
    runner: ModelRunner,
    checkpoint: TinyCheckpoint,
    pairs: list[tuple[list[int], list[int]]],
    tables: list[EmbeddingTable],
) -> None:
    """Beside a prompt of the vocabulary's tokens only, whose tokens must not change."""
    plain, plain_tokens = checkpoint.prompt(9, NUM_TOKENS)
    expected = [*(tokens for _, tokens in pairs), plain_tokens]
    for options in ({}, {"chunk": 1}, {"chunk": 5}, {"pauses_at": 3}):
        batch = [*works(pairs, tables, **options), Work(prompt=plain, max_tokens=NUM_TOKENS)]
        batch[1].arrives = 3
        assert Driver(runner).run(batch) == expected
    assert not runner._table.embedding_tables


def test_embeddings_of_the_whole_prompt(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """Those of a prompt of ids give the tokens of these ids, and no id of the vocabulary is needed."""
    prompt, expected = checkpoint.prompt(11, NUM_TOKENS)
    rows = checkpoint.model.get_input_embeddings()(torch.tensor(prompt)).detach()
    own = Work(
        prompt=list(range(OWN, OWN + len(prompt))), max_tokens=NUM_TOKENS, embedding_table=EmbeddingTable.of(rows)
    )
    assert Driver(runner).run([own]) == [expected]


def test_penalties_and_repeated_ngrams_look_at_the_vocabulary_only(
    runner: ModelRunner, pairs: list[tuple[list[int], list[int]]], tables: list[EmbeddingTable]
) -> None:
    """Ids beyond it are nobody's counts: also not those of the row behind, which has the same sampling."""
    sampling = SamplingConfig(repetition_penalty=1.2, frequency_penalty=0.1, no_repeat_ngram_size=2)
    alone = [Driver(runner).run([work])[0] for work in works(pairs, tables, sampling=sampling)]
    assert Driver(runner).run(works(pairs, tables, sampling=sampling)) == alone
    assert alone != [tokens for _, tokens in pairs]
    pairs_of_tokens = [list(pairwise(tokens)) for tokens in alone]
    assert all(len(set(found)) == len(found) for found in pairs_of_tokens)


def test_a_network_that_needs_token_ids_takes_no_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model

    forward = GPT2Model.forward

    def needs_ids(self: GPT2Model, input_ids: Any = None, **inputs: Any) -> Any:
        if input_ids is None:
            raise ValueError("input_ids are needed")
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(GPT2Model, "forward", needs_ids)
    checkpoint = write_checkpoint(tmp_path, transformers_checkpoints.CONFIGS["gpt2"], 4)
    runner = load(checkpoint.folder, device="cpu", model_impl="transformers")
    assert runner.limits.embedding_size == 0
    runner.close()


def on_two_ranks(group: PipeGroup, folder: Path, prompts: list[list[int]], table: EmbeddingTable) -> list[list[int]]:
    runner = load(folder, group, device="cpu", tensor_parallel_size=2)
    batch = [Work(prompt=prompt, max_tokens=NUM_TOKENS, embedding_table=table, chunk=9) for prompt in prompts]
    batch[0].pauses_at = 5
    outputs = Driver(runner).run(batch)
    group.barrier()
    runner.close()
    return outputs


def test_on_two_ranks(tmp_path: Path) -> None:
    checkpoint, table = make_checkpoint(tmp_path, "granite"), make_table(7)
    pairs = [checkpoint.prompt(length, NUM_TOKENS, table) for length in (8, 21)]
    prompts, expected = [prompt for prompt, _ in pairs], [tokens for _, tokens in pairs]
    assert run_on_two_ranks(on_two_ranks, tmp_path, prompts, table) == [expected, expected]


@needs_compiler
def test_compiled_layers_take_them_as_torch_does(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama-wide", torch.bfloat16)
    compiled, in_torch = (Network.load(checkpoint, choice, "bfloat16") for choice in ("true", "false"))
    step = Step(decodes=(5, 9), prefills=((0, 7), (8, 6)))
    rows_GD = torch.randn(4, 96, generator=torch.Generator().manual_seed(3))
    given = GivenEmbeddings(places_G=torch.tensor([14, 1, 4, 2]), rows_GD=rows_GD)
    found, expected = compiled.logits(step, given), in_torch.logits(step, given)
    plain = compiled.logits(step)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert torch.equal(found[[0]], plain[[0]])
    for place in (1, 2, 4, 14):
        assert (found[place] - plain[place]).norm() > 0.3 * plain[place].norm()


def test_prompts_differ_by_their_embeddings(
    runner: ModelRunner, checkpoint: TinyCheckpoint, tables: list[EmbeddingTable]
) -> None:
    """The same ids with another table are another prompt, so the tests above see which rows are used."""
    prompt = make_prompt(13, 0, 7)
    other = make_table(7, runner.limits.embedding_size, seed=9)
    first, second = (
        Driver(runner).run([Work(prompt=prompt, max_tokens=NUM_TOKENS, embedding_table=table)])[0]
        for table in (tables[1], other)
    )
    assert first != second


@pytest.mark.parametrize("cpu_compile", ["false", pytest.param("true", marks=needs_compiler)])
def test_inputs_of_layers_are_those_of_padding(tmp_path: Path, cpu_compile: str) -> None:
    """Beside given embeddings, as transformers has them beside those of images."""
    checkpoint = make_checkpoint(tmp_path, "gemma4-wide")
    model, table = checkpoint.model, make_table(7, 64, 1)
    prompts = [make_prompt(length, 0, table.num_rows) for length in range(5, 13)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            inputs = model.model.get_per_layer_inputs(ids.masked_fill(ids >= SIZES["vocab_size"], 0), None)
            logits = model(inputs_embeds=checkpoint._embed(ids, table), per_layer_inputs=inputs).logits
        expected.append([int(logits[0, -1].argmax())])
    runner = load(tmp_path, device="cpu", model_impl="native", cpu_compile=cpu_compile)
    try:
        found = Driver(runner).run([Work(prompt=each, max_tokens=1, embedding_table=table) for each in prompts])
    finally:
        runner.close()
    assert found == expected
