"""Which tokens may be chosen, through the whole runner: end tokens, bad words and repeated n-grams."""

from __future__ import annotations

import pytest
import torch
from model_driver import Driver, Work
from sampling_runs import as_tensors, greedy, run
from tiny_checkpoints import TinyCheckpoint, make_prompt
from transformers import (
    NoRepeatNGramLogitsProcessor,
)

from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.repeated_ngrams import RepeatedNgrams
from inflight.runtime.sampler import find_allowed
from inflight.runtime.sampling_input import NO_TOKEN, Restrictions, SamplingInput, SamplingNeeds
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.slow


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
