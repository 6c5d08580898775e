"""Random tokens through the whole runner: penalties, filters, seeds, log probabilities and broken numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from sampling_runs import greedy, load, run
from tiny_checkpoints import SIZES, TinyCheckpoint, make_prompt
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import inflight_kernels
from inflight.runtime.model_runner import ModelRunner
from inflight.sampling_config import MAX_SEED, SamplingConfig

POISON = 201
"""A token whose embedding is NaN in one of the checkpoints."""

pytestmark = pytest.mark.slow


# -- penalties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 2.5},
        {"frequency_penalty": 1.1},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.9},
    ],
    ids=lambda penalties: "+".join(penalties),
)
@pytest.mark.parametrize("pauses_at", [0, 5])
def test_penalties(
    runner: ModelRunner, checkpoint: TinyCheckpoint, penalties: dict[str, float], pauses_at: int
) -> None:
    """Repetition counts prompt and output, the others the output alone: also of a row that was paused."""
    sampling = SamplingConfig(**penalties)
    prompt = make_prompt(12)

    def change(logits: torch.Tensor, output: list[int]) -> None:
        for token in set(prompt + output):
            above_zero = logits[token] > 0
            logits[token] *= 1 / sampling.repetition_penalty if above_zero else sampling.repetition_penalty
        for token in set(output):
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)

    expected = greedy(checkpoint, prompt, 14, change)
    assert expected != greedy(checkpoint, prompt, 14, lambda logits, output: None)
    other = Work(prompt=make_prompt(7), max_tokens=14)
    work = Work(prompt=prompt, max_tokens=14, sampling=sampling, pauses_at=pauses_at)
    Driver(runner).run([other, work])
    assert work.output == expected
    assert other.output == checkpoint.expected(other.prompt, 14)


# -- typical sampling --------------------------------------------------------------------------------------------------


def test_typical_p_draws_from_what_transformers_keeps(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """Each request alone, among others that use other filters or none, and after a pause: the same tokens."""
    samplings = [
        SamplingConfig(temperature=1.5, typical_p=0.3, seed=seed, **options)
        for seed, options in enumerate(({}, {"top_k": 30}, {"top_p": 0.8, "frequency_penalty": 0.4}, {"min_p": 0.05}))
    ]
    others = [SamplingConfig(), SamplingConfig(temperature=1.5, top_p=0.7, seed=9)]
    alone = [run(runner, prompt=make_prompt(12), max_tokens=12, sampling=each) for each in (*samplings, *others)]
    for pauses_at in (0, 5):
        batch = [
            Work(prompt=make_prompt(12), max_tokens=12, sampling=each, pauses_at=pauses_at, arrives=place)
            for place, each in enumerate((*others, *samplings))
        ]
        found = Driver(runner).run(batch)
        assert found[2:] + found[:2] == alone
    for sampling, output in zip(samplings, alone, strict=False):
        with torch.no_grad():
            logits = checkpoint.model(torch.tensor([make_prompt(12) + output])).logits[0, 11:-1]
        num_kept = []
        for place, scores_V in enumerate(logits):
            for token in set(output[:place]):
                scores_V[token] -= sampling.frequency_penalty * output[:place].count(token)
            scores = TemperatureLogitsWarper(sampling.temperature)(None, scores_V[None])
            if sampling.top_k:
                scores = TopKLogitsWarper(sampling.top_k)(None, scores)
            if sampling.top_p < 1:
                scores = TopPLogitsWarper(sampling.top_p)(None, scores)
            if sampling.min_p:
                scores = MinPLogitsWarper(sampling.min_p)(None, scores)
            kept = TypicalLogitsWarper(sampling.typical_p)(None, scores)[0] > float("-inf")
            probs = scores[0].masked_fill(~kept, float("-inf")).softmax(0)
            uniform = inflight_kernels.philox_uniform(torch.tensor([sampling.seed]), torch.tensor([12 + place]))
            assert output[place] == int((probs.cumsum(0) <= uniform).sum())
            num_kept.append(int(kept.sum()))
        assert max(num_kept) < SIZES["vocab_size"] / 3
        assert len(set(num_kept)) > 2


# -- randomness --------------------------------------------------------------------------------------------------------


def random_work(seed: int, **options: Any) -> Work:
    return Work(prompt=make_prompt(10), max_tokens=12, sampling=SamplingConfig(temperature=0.9, seed=seed), **options)


def test_a_seed_decides_whoever_shares_the_batch(runner: ModelRunner) -> None:
    """The same tokens alone, beside others, in another row, in chunks, after a pause."""
    alone = Driver(runner).run([random_work(5)])[0]
    others = [
        Work(prompt=make_prompt(3), max_tokens=20),
        Work(prompt=make_prompt(14), max_tokens=9, sampling=SamplingConfig(temperature=2.0, top_k=4, seed=1)),
        Work(prompt=make_prompt(6), max_tokens=9, sampling=SamplingConfig(repetition_penalty=1.5), log_probs=True),
    ]
    same = [random_work(5, arrives=2), random_work(5, chunk=3), random_work(5, pauses_at=4)]
    Driver(runner, seed=3).run([*others, *same])
    assert [work.output for work in same] == [alone] * 3


def test_seeds_differ(runner: ModelRunner) -> None:
    seeds = [0, 1, 2**63, MAX_SEED, 2**40]
    outputs = Driver(runner).run([random_work(seed) for seed in seeds])
    assert len({tuple(output) for output in outputs}) == len(seeds)


@pytest.mark.parametrize("filter_", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_filters_that_leave_one_token_are_greedy(
    runner: ModelRunner, checkpoint: TinyCheckpoint, filter_: dict[str, Any]
) -> None:
    prompt = make_prompt(10)
    sampling = SamplingConfig(temperature=1.5, seed=9, **filter_)
    assert run(runner, prompt=prompt, max_tokens=12, sampling=sampling) == checkpoint.expected(prompt, 12)


def test_filters_of_one_row_leave_the_others_alone(runner: ModelRunner) -> None:
    alone = Driver(runner).run([random_work(5)])[0]
    filtered = Work(prompt=make_prompt(10), max_tokens=12, sampling=SamplingConfig(temperature=0.9, top_k=1, top_p=0.5))
    beside = random_work(5)
    Driver(runner).run([filtered, beside])
    assert beside.output == alone


# -- log probabilities and broken numbers ------------------------------------------------------------------------------


def test_log_probs_are_of_the_raw_distribution(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    sampling = SamplingConfig(temperature=1.3, top_k=20, seed=3, repetition_penalty=1.4)
    work = Work(prompt=make_prompt(9), max_tokens=8, sampling=sampling, log_probs=True, bad_words=[[5]])
    silent = Work(prompt=make_prompt(9), max_tokens=8)
    Driver(runner).run([silent, work])
    with torch.inference_mode():
        log_probs = checkpoint.model(torch.tensor([work.token_ids])).logits[0, 8:-1].log_softmax(-1)
    expected = log_probs.gather(1, torch.tensor(work.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(work.output_log_probs), expected, rtol=0, atol=2e-5)


def test_no_log_probs_unless_asked(runner: ModelRunner) -> None:
    work = Work(prompt=make_prompt(9), max_tokens=4)
    Driver(runner).run([work])
    assert work.output_log_probs == []


@pytest.fixture(scope="module")
def poisoned_runner(checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    """Of one token it computes nothing finite. (A checkpoint with such a weight is refused.)"""
    runner = load(checkpoint.folder, device)
    with torch.inference_mode():
        runner._computation.decoder.embedding.weight_UD[POISON] = torch.nan  # type: ignore[attr-defined]
    yield runner
    runner.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_ends_alone(
    poisoned_runner: ModelRunner, checkpoint: TinyCheckpoint, temperature: float
) -> None:
    """Its neighbours get their tokens, and whoever takes over its row and its blocks afterwards too."""
    good = [checkpoint.prompt(length, 10) for length in (3, 14, 9)]
    works = [Work(prompt=prompt, max_tokens=10) for prompt, _ in good]
    bad = Work(
        # The first block is a neighbour's too, and must stay as it is.
        prompt=[*good[1][0][:4], POISON, *make_prompt(12)],
        max_tokens=10,
        arrives=2,
        shares=works[1],
        shared_blocks=1,
        sampling=SamplingConfig(temperature=temperature),
        log_probs=True,
    )
    assert not any(POISON in prompt + tokens for prompt, tokens in good)
    driver = Driver(poisoned_runner)
    driver.run([*works, bad])
    assert bad.error.startswith("the model's logits are not finite")
    assert bad.output == []
    assert [work.output for work in works] == [tokens for _, tokens in good]
    blocks = set(bad.blocks[1:])
    for work in works:
        driver.release(work)
    # Blocks given back last are taken first, here by the row whose last block is the emptiest: padded in the
    # batch, it multiplies what that block held by 0.
    driver.release(bad)
    good.sort(key=lambda pair: len(pair[0]) % 4)
    again = [Work(prompt=prompt, max_tokens=10) for prompt, _ in good]
    driver.run(again)
    assert blocks <= {block for work in again for block in work.blocks}
    assert [work.output for work in again] == [tokens for _, tokens in good]
