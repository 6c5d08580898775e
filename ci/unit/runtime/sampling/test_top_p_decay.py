"""A top_p that decays from token to token, through the whole runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_driver import Driver, Work
from sampling_runs import run
from tiny_checkpoints import make_prompt

from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.row_table import current_top_p
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NewSequence

pytestmark = pytest.mark.slow


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
    held = runner._computation.state.floats_FR[1]
    new = NewSequence(row=0, token_ids=[1, *output], num_prompt_tokens=1, block_ids=[], sampling_config=sampling)
    assert current_top_p(new) in held.tolist()
