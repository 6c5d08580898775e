"""What a request may ask of its tokens, through the whole runner and against a plain oracle on transformers' logits.

Run: pytest ci/unit/runtime/test_sampler.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_driver import Driver, Work
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SIZES, TinyCheckpoint, make_checkpoint, make_prompt
from transformers import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import inflight_kernels
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.repeated_ngrams import RepeatedNgrams
from inflight.runtime.row_table import current_top_p
from inflight.runtime.sampler import find_allowed
from inflight.runtime.sampling_input import NO_TOKEN, Restrictions, SamplingInput, SamplingNeeds
from inflight.sampling_config import MAX_SEED, SamplingConfig
from inflight.scheduler_output import NewSequence

pytestmark = pytest.mark.slow

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
POISON = 201
"""A token whose embedding is NaN in one of the checkpoints."""


def load(folder: Path, device: str) -> ModelRunner:
    config = EngineConfig(
        gpt_model_path=str(folder),
        device=device,
        max_batch_size=8,
        max_num_tokens=128,
        max_seq_len=64,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=512,
    )
    return ModelRunner.load(config, SingleRank())


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    runner = load(checkpoint.folder, device)
    yield runner
    runner.close()


def greedy(
    checkpoint: TinyCheckpoint, prompt: list[int], num_tokens: int, change: Callable[[torch.Tensor, list[int]], None]
) -> list[int]:
    """Greedy decoding where `change` edits the logits, given the output so far."""
    output: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = checkpoint.model(torch.tensor([prompt + output])).logits[0, -1]
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


def run(runner: ModelRunner, **options: Any) -> list[int]:
    return Driver(runner).run([Work(**options)])[0]


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


# -- restrictions ------------------------------------------------------------------------------------------------------


def test_min_tokens(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    prompt = make_prompt(9)
    free = checkpoint.expected(prompt, 8)
    end_ids = [free[2], free[5]]

    def change(logits: torch.Tensor, output: list[int]) -> None:
        if len(output) < 4:
            logits[end_ids] = -torch.inf

    expected = greedy(checkpoint, prompt, 8, change)
    assert expected != free
    sampling = SamplingConfig(min_tokens=4)
    assert run(runner, prompt=prompt, max_tokens=8, end_ids=end_ids, sampling=sampling) == expected
    # A row that starts again after a pause knows how many tokens it already has.
    assert run(runner, prompt=prompt, max_tokens=8, end_ids=end_ids, sampling=sampling, pauses_at=3) == expected


@pytest.mark.parametrize("pauses_at", [0, 6])
def test_bad_words(runner: ModelRunner, checkpoint: TinyCheckpoint, pauses_at: int) -> None:
    """Of one token, of several, one that begins in the prompt, two that end alike; beside a row without any."""
    prompt = make_prompt(9)
    free = checkpoint.expected(prompt, 12)
    bad_words = [[free[4]], free[1:3], [*prompt[-2:], free[0]], [free[8], free[9]], [7, free[9]], [3] * 30]

    def change(logits: torch.Tensor, output: list[int]) -> None:
        for *beginning, last in bad_words:
            if not beginning or (prompt + output)[-len(beginning) :] == beginning:
                logits[last] = -torch.inf

    expected = greedy(checkpoint, prompt, 12, change)
    assert expected[0] != free[0]
    other = Work(prompt=prompt, max_tokens=12)
    work = Work(prompt=prompt, max_tokens=12, bad_words=bad_words, pauses_at=pauses_at)
    Driver(runner).run([other, work])
    assert work.output == expected
    assert other.output == free


def test_a_second_bad_word_is_avoided_when_it_would_be_completed(
    runner: ModelRunner, checkpoint: TinyCheckpoint
) -> None:
    prompt = make_prompt(9)
    free = checkpoint.expected(prompt, 6)
    output = run(runner, prompt=prompt, max_tokens=6, bad_words=[free[2:5]])
    assert output[:4] == free[:4]
    assert output[4] != free[4]


def test_allowed_tokens_by_hand() -> None:
    """Two rows of five tokens. Row 0 holds 1 2 3; row 1 holds 4."""
    history = torch.tensor([[1, 2, 3, 0], [4, 9, 9, 9]])
    restrictions = Restrictions(
        places_X=torch.tensor([0, 1, 1, 2, 5 + 3, 5 + 4]),
        beginnings_XL=torch.tensor(
            [
                [NO_TOKEN, NO_TOKEN, NO_TOKEN],
                [NO_TOKEN, 2, 3],
                [NO_TOKEN, 2, 4],
                [1, 2, 4],
                [NO_TOKEN, NO_TOKEN, 4],
                [9, 9, 4],
            ]
        ),
        rows_X=torch.tensor([0, 0, 0, 0, 1, 1]),
        lengths_X=torch.tensor([3, 3, 3, 3, 1, 1]),
    )
    allowed = find_allowed(torch.zeros(2, 5), asking(restrictions=restrictions), history)
    assert allowed is not None
    assert allowed.tolist() == [[False, False, True, True, True], [True, True, True, False, True]]


def asking(restrictions: Restrictions | None = None, ngrams: RepeatedNgrams | None = None) -> SamplingInput:
    needs = SamplingNeeds(**dict.fromkeys(SamplingNeeds.__dataclass_fields__, False))
    none = torch.empty(0, dtype=torch.int64)
    return SamplingInput(rows_S=none, lengths_S=none, needs=needs, restrictions=restrictions, ngrams=ngrams)


@pytest.mark.parametrize("vocab_size", [6, 3])
def test_repeated_ngrams_against_transformers(vocab_size: int) -> None:
    """Rows of several sizes and lengths in one step; what stands behind a row's text is not looked at. A text may hold
    ids beyond the vocabulary, as prompts do that bring embeddings of their own: these forbid nobody's token."""
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(0, 4, (9, 40), generator=generator)
    sizes, lengths = [1, 2, 3, 2, 4, 3, 7], [3, 2, 30, 39, 25, 3, 33]
    ngrams = RepeatedNgrams(
        owners_K=torch.arange(7),
        rows_K=torch.arange(7) + 1,
        lengths_K=torch.tensor(lengths),
        sizes_K=torch.tensor(sizes),
        largest=max(sizes),
        width=max(lengths),
    )
    allowed = find_allowed(torch.zeros(8, vocab_size), asking(ngrams=ngrams), history)
    assert allowed is not None
    for row, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        scores = NoRepeatNGramLogitsProcessor(size)(history[row + 1 : row + 2, :length], torch.zeros(1, 6))
        assert allowed[row].tolist() == (scores[0, :vocab_size] == 0).tolist(), (size, length)
    assert allowed[7].all()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("pauses_at", [0, 6])
def test_no_ngram_is_repeated(runner: ModelRunner, checkpoint: TinyCheckpoint, size: int, pauses_at: int) -> None:
    """Prompt and output together, where only five tokens are likely; beside a row that may repeat itself."""
    likely = dict.fromkeys((11, 12, 13, 14, 15), 60.0)
    prompt = [11, 12, 11, 11, 13, 7]

    def change(logits: torch.Tensor, output: list[int]) -> None:
        logits[list(likely)] += 60.0
        ids = torch.tensor([prompt + output])
        logits.copy_(NoRepeatNGramLogitsProcessor(size)(ids, logits[None])[0])

    expected = greedy(checkpoint, prompt, 20, change)
    free = greedy(checkpoint, prompt, 20, lambda logits, output: logits.index_add_(0, *as_tensors(likely)))
    assert expected != free
    sampling = SamplingConfig(logit_bias=likely, no_repeat_ngram_size=size)
    work = Work(prompt=prompt, max_tokens=20, sampling=sampling, pauses_at=pauses_at, bad_words=[[200, 200]])
    other = Work(prompt=prompt, max_tokens=20, sampling=SamplingConfig(logit_bias=likely))
    Driver(runner).run([other, work])
    assert work.output == expected
    assert other.output == free


# -- biases ------------------------------------------------------------------------------------------------------------


def as_tensors(bias: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(list(bias)), torch.tensor(list(bias.values()))


@pytest.mark.parametrize("pauses_at", [0, 4])
def test_biases_are_added_before_penalties(runner: ModelRunner, checkpoint: TinyCheckpoint, pauses_at: int) -> None:
    """Of some tokens, as by transformers' SequenceBias, and of the whole vocabulary; a row without is left alone."""
    prompt = make_prompt(12)
    plain = checkpoint.expected(prompt, 12)
    sparse = {plain[0]: -30.0, 17: 3.25, 18: 3.0, 202: 2.5}
    dense = np.linspace(-2, 2, SIZES["vocab_size"], dtype="<f4")
    processor = SequenceBiasLogitsProcessor({(token,): bias for token, bias in sparse.items()})

    def change(logits: torch.Tensor, output: list[int]) -> None:
        logits += torch.from_numpy(dense)
        logits.copy_(processor(torch.tensor([prompt + output]), logits[None])[0])
        for token in set(prompt + output):
            logits[token] *= 1 / 1.7 if logits[token] > 0 else 1.7

    expected = greedy(checkpoint, prompt, 12, change)
    assert plain[0] not in expected
    sampling = SamplingConfig(logit_bias=sparse, embedding_bias=dense.tobytes(), repetition_penalty=1.7)
    work = Work(prompt=prompt, max_tokens=12, sampling=sampling, pauses_at=pauses_at, log_probs=True)
    other = Work(prompt=prompt, max_tokens=12)
    Driver(runner).run([other, work])
    assert work.output == expected
    assert other.output == plain
    with torch.inference_mode():
        raw = checkpoint.model(torch.tensor([work.token_ids])).logits[0, 11:-1].log_softmax(-1)
    of_output = raw.gather(1, torch.tensor(work.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(work.output_log_probs), of_output, rtol=0, atol=2e-5)


def test_a_bias_leaves_its_row_with_its_sequence(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """Whoever takes the row next, beside a biased one, is not biased."""
    prompt = make_prompt(9)
    plain = checkpoint.expected(prompt, 8)
    biased = SamplingConfig(logit_bias={plain[0]: -50.0})
    works = [Work(prompt=prompt, max_tokens=2, sampling=biased) for _ in range(4)]
    driver = Driver(runner)
    driver.run(works)
    assert all(work.output[0] != plain[0] for work in works)
    beside = Work(prompt=prompt, max_tokens=8, sampling=biased)
    again = [Work(prompt=prompt, max_tokens=8) for _ in range(7)]
    driver.run([beside, *again])
    assert {work.row for work in works} <= {work.row for work in again}
    assert all(work.output == plain for work in again)


# -- a top_p that decays -----------------------------------------------------------------------------------------------


def decaying(**changes: Any) -> SamplingConfig:
    values = {"temperature": 1.4, "top_p": 0.95, "top_p_decay": 0.7, "top_p_min": 0.15, "seed": 8, **changes}
    return SamplingConfig(**values)


def test_top_p_decays_and_is_reset(runner: ModelRunner) -> None:
    """Each token is the one that a request with that very top_p gets at that place."""
    prompt = make_prompt(10)
    free = run(runner, prompt=prompt, max_tokens=24, sampling=decaying())
    reset = next(token for place, token in enumerate(free) if place >= 3)
    sampling = decaying(top_p_reset_ids=reset)
    output = run(runner, prompt=prompt, max_tokens=24, sampling=sampling)
    assert reset in output[:-1]
    top_p, seen = 0.95, []
    for place, token in enumerate(output):
        seen.append(top_p)
        fixed = decaying(top_p=top_p, top_p_decay=1.0, top_p_min=1e-6)
        work = Work(prompt=prompt, output=output[:place], max_tokens=place + 1, sampling=fixed)
        assert Driver(runner).run([work])[0][-1] == token, place
        top_p = 0.95 if token == reset else max(float(np.float32(top_p) * np.float32(0.7)), 0.15)
    assert len(set(seen)) > 3 and seen.count(0.95) > 1


def test_a_decayed_top_p_survives_pauses_chunks_and_neighbours(runner: ModelRunner) -> None:
    def work(**options: Any) -> Work:
        return Work(prompt=make_prompt(10), max_tokens=16, sampling=decaying(top_p_reset_ids=reset), **options)

    reset = run(runner, prompt=make_prompt(10), max_tokens=4, sampling=decaying())[2]
    alone = Driver(runner).run([work()])[0]
    assert alone != run(runner, prompt=make_prompt(10), max_tokens=16, sampling=decaying(top_p_decay=1.0))
    steady = Work(prompt=make_prompt(6), max_tokens=20, sampling=SamplingConfig(temperature=1.0, top_p=0.8, seed=4))
    expected = Driver(runner).run([Work(prompt=make_prompt(6), max_tokens=20, sampling=steady.sampling)])[0]
    works = [work(pauses_at=5), work(chunk=3), work(output=alone[:7]), work(arrives=3)]
    Driver(runner).run([steady, *works])
    assert [each.output for each in works] == [alone] * 4
    assert steady.output == expected


def test_host_and_device_decay_top_p_to_the_same_bits(runner: ModelRunner) -> None:
    sampling = decaying(top_p=0.999, top_p_decay=0.937, top_p_min=0.01)
    output = run(runner, prompt=make_prompt(10), max_tokens=30, sampling=sampling)
    held = runner._state.floats_FR[1]
    new = NewSequence(row=0, token_ids=[1, *output], num_prompt_tokens=1, block_ids=[], sampling_config=sampling)
    assert current_top_p(new) in held.tolist()


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
def poisoned_runner(
    checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Iterator[ModelRunner]:
    folder = tmp_path_factory.mktemp("poisoned")
    weights = load_file(checkpoint.folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((checkpoint.folder / "config.json").read_text())
    runner = load(folder, device)
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
