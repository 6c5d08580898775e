"""Biases of logits, through the whole runner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_driver import Driver, Work
from sampling_runs import greedy
from tiny_checkpoints import SIZES, TinyCheckpoint, make_prompt
from transformers import (
    SequenceBiasLogitsProcessor,
)

from inflight.runtime.model_runner import ModelRunner
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.slow


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
