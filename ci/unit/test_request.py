"""Bounds on what a request may ask for."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from wrong_values import WRONG_SAMPLING, WrongValue

from inflight.errors import InvalidRequest
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.sampling_config import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    SamplingConfig,
)
from inflight_kernels.sampling.reference import process_logits


# A front takes a temperature by which logits cannot be divided for 0.
@pytest.mark.parametrize("wrong", [*WRONG_SAMPLING, WrongValue("temperature", 1e-40, "temperature must be 0")], ids=str)
def test_a_wrong_value_is_refused_in_one_sentence(wrong: WrongValue) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(wrong.sentence)}"):
        SamplingConfig(**{wrong.field: wrong.value}).validate()


@pytest.mark.parametrize("repetition", [MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_stay_finite_at_all_bounds_together(repetition: float, sign: float) -> None:
    SamplingConfig(
        repetition_penalty=repetition, presence_penalty=sign * MAX_PENALTY, frequency_penalty=MAX_PENALTY
    ).validate()
    x = process_logits(
        torch.tensor([[1e4, -1e4, 0.0]]),
        repetition_penalty=torch.tensor([repetition]),
        presence_penalty=torch.tensor([sign * MAX_PENALTY]),
        frequency_penalty=torch.tensor([sign * MAX_PENALTY]),
        prompt_mask=torch.tensor([[True, True, True]]),
        output_counts=torch.full((1, 3), 2**31 - 1, dtype=torch.int32),
        logit_bias=torch.tensor([[MAX_BIAS, -MAX_BIAS, 0.0]]) * 2,
        allowed_mask=None,
    )
    assert x.isfinite().all()


def test_bounds_can_be_sent_as_float32() -> None:
    limits = RequestLimits(vocab_size=9, max_seq_len=9, max_input_len=8, kv_cache_tokens=99)
    for bias, penalty, repetition in ((1e30, 1e20, 1e6), (-1e30, -1e20, 1e-6)):
        sampling = SamplingConfig(
            logit_bias={3: float(np.float32(bias))},
            embedding_bias=np.full(9, bias, "<f4").tobytes(),
            presence_penalty=float(np.float32(penalty)),
            frequency_penalty=float(np.float32(penalty)),
            repetition_penalty=float(np.float32(repetition)),
        )
        limits.validate(Request(input_token_ids=[1], max_tokens=1, sampling_config=sampling))


def test_end_tokens_are_bounded() -> None:
    """64 beams with 2000 of them each would sort eight million candidates a step."""
    limits = RequestLimits(vocab_size=999, max_seq_len=9, max_input_len=8, kv_cache_tokens=99)
    limits.validate(Request(input_token_ids=[1], max_tokens=1, end_ids=list(range(128))))
    with pytest.raises(InvalidRequest, match="end_ids has 129 entries, more than 128"):
        limits.validate(Request(input_token_ids=[1], max_tokens=1, end_ids=list(range(129))))
