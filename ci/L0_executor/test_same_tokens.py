"""Real ranks on our own checkpoint: the same tokens and numbers, however many ranks there are and whatever joins them.

In float32: the order of a sum decides the last digit, which in bfloat16 is coarse enough to change a draw.

pytest ci/L0_executor/test_same_tokens.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from real_engine import Engine, StartEngine, listening_addresses, starting

from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.sampling_config import SamplingConfig
from inflight.sequence_seed import sequence_seed

PROMPTS = [[10, 20, 30], list(range(40, 75)), [7], [90, 91, 90, 91, 90, 91]]
MANY, NEW = 24, 24
"""Requests, and tokens of each."""
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
COMMON = {"dtype": "float32", "max_num_tokens": "16"}
"""So few tokens a step that prompts come in chunks."""


@pytest.fixture(scope="module")
def start() -> Iterator[StartEngine]:
    with starting() as start:
        yield start


@pytest.fixture(scope="module")
def one(start: StartEngine) -> Engine:
    return start(**COMMON)


@pytest.fixture(scope="module")
def two(start: StartEngine) -> Engine:
    """Two ranks under MPI."""
    return start(**COMMON, tensor_parallel_size="2")


@pytest.mark.parametrize("seed", [None, 5])
def test_tokens_do_not_depend_on_the_number_of_ranks(one: Engine, two: Engine, seed: int | None) -> None:
    assert two.generate(PROMPTS, 24, seed) == one.generate(PROMPTS, 24, seed)


def test_nor_on_what_joins_them(one: Engine, start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MPI; under MPI without a compiler, and so without shared memory; and one rank under MPI."""
    expected = [one.generate(PROMPTS, 24, seed) for seed in (None, 5)]
    without_mpi = start(**COMMON, tensor_parallel_size="2", executor="multiproc")
    monkeypatch.setenv("CXX", "no-such-compiler")
    sockets = start(**COMMON, tensor_parallel_size="2")
    monkeypatch.undo()
    alone = start(**COMMON, executor="mpi")
    for engine in (without_mpi, sockets, alone):
        assert [engine.generate(PROMPTS, 24, seed) for seed in (None, 5)] == expected
    assert {address for pid in sockets.executor.engine_pids() for address in listening_addresses(pid)} <= LOOPBACK
    for engine in (without_mpi, sockets, alone):
        engine.executor.shutdown()


def test_two_ranks_give_every_sequence_of_a_request_its_own_tokens(one: Engine, two: Engine) -> None:
    """Those of requests of their own on one rank; the prompts' blocks are shared and copied on both ranks."""
    ids = [two.submit(prompt, 24, seed=5, streaming=True, num_return_sequences=3) for prompt in PROMPTS]
    for index in range(3):
        expected = one.generate(PROMPTS, 24, seed=sequence_seed(5, index))
        assert [two.tokens(request_id, index) for request_id in ids] == expected


def test_beams_do_not_depend_on_the_number_of_ranks(one: Engine, two: Engine) -> None:
    """Each rank chooses for itself, and forks the same blocks; beside greedy and sampled requests."""
    found = []
    for engine in (one, two):
        searches = [
            engine.submit(
                prompt,
                20,
                sampling_config=SamplingConfig(beam_width=2 + index % 2, length_penalty=float(index)),
                num_return_sequences=2,
                end_ids=list(range(0, 400, 7)),
            )
            for index, prompt in enumerate(PROMPTS)
        ]
        others = [engine.submit(prompt, 20, seed=seed) for prompt in PROMPTS for seed in (None, 5)]
        tokens = [engine.tokens(id_, index) for id_ in searches for index in range(2)]
        found.append((tokens, [engine.tokens(id_) for id_ in others]))
    assert found[1] == found[0]
    assert len({tuple(tokens) for tokens in found[0][0]}) == 2 * len(PROMPTS)


OUTPUTS = OutputConfig(
    return_log_probs=True,
    num_log_probs=3,
    return_prompt_log_probs=True,
    return_context_logits=True,
    return_generation_logits=True,
    additional_model_outputs=[
        AdditionalModelOutput(name="hidden_states", gather_context=True),
        AdditionalModelOutput(name="hidden_states.1"),
    ],
)
SAMPLINGS = [
    SamplingConfig(no_repeat_ngram_size=2, logit_bias={7: 12.0, 8: 12.0}),
    SamplingConfig(temperature=1.0, seed=3, top_p=0.95, top_p_decay=0.9, top_p_min=0.3, top_p_reset_ids=11),
    SamplingConfig(temperature=0.7, seed=4, repetition_penalty=1.2),
]


def test_tensors_and_choices_do_not_depend_on_the_number_of_ranks(one: Engine, two: Engine) -> None:
    """Streamed and not, beside requests that ask for nothing; the numbers come through the socket as they are."""
    found = []
    for engine in (one, two):
        asked = [
            engine.submit(prompt, 12, streaming=index == 0, sampling_config=sampling, output_config=OUTPUTS)
            for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=False))
        ]
        silent = [engine.submit(prompt, 12) for prompt in PROMPTS]
        found.append(
            ([engine.tokens(id_) for id_ in (*asked, *silent)], [engine.tensors(id_) for id_ in (*asked, *silent)])
        )
    (tokens, tensors), (tokens_of_two, tensors_of_two) = found
    assert tokens_of_two == tokens
    for expected, arrays in zip(tensors, tensors_of_two, strict=True):
        assert set(arrays) == set(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(arrays[name], array, rtol=0, atol=1e-3, err_msg=name)
    limits = one.executor.limits
    assert tensors[0]["context_logits"].shape == (len(PROMPTS[0]), limits.vocab_size)
    assert tensors[0]["generation_logits"].shape == (12, limits.vocab_size)
    assert tensors[0]["hidden_states"].shape == (12, limits.hidden_size)
    assert all(not each for each in tensors[len(SAMPLINGS) :])


def test_two_ranks_serve_more_requests_than_fit_into_a_batch(one: Engine, two: Engine) -> None:
    rng = random.Random(24)
    prompts = [[rng.randrange(5, 2000) for _ in range(rng.randrange(1, 40))] for _ in range(MANY)]
    assert two.generate(prompts, NEW) == one.generate(prompts, NEW)


def test_two_threads_give_the_tokens_of_one(one: Engine, start: StartEngine) -> None:
    threads = start(**COMMON, num_threads="2")
    assert threads.generate(PROMPTS, 24, seed=5) == one.generate(PROMPTS, 24, seed=5)
    threads.executor.shutdown()
