"""Logits post-processors on two ranks: called by both, or by the leader for both; what fails, fails on both.

pytest ci/L0_executor/test_post_processor_ranks.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from logit_functions import FAVOURITES
from real_engine import Engine

from inflight.run_directory import RUN_DIRECTORY
from inflight.sampling_config import SamplingConfig

PROMPT, NUM_TOKENS = [10, 20, 30], 30
NAMES = ("favour", "fail_on_follower", "differ", "fail")


@pytest.fixture(scope="module", params=["true", "false"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    run_directory = Path(tempfile.mkdtemp(prefix="run-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, str(run_directory))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"))
        engine = Engine(
            run_directory,
            tensor_parallel_size="2",
            dtype="float32",
            logits_post_processors=",".join(f"{name}=logit_functions:{name}" for name in NAMES),
            logits_post_processor_batched="logit_functions:favour_all",
            logits_post_processor_replicate=request.param,
        )
        engine.executor.start()
        yield engine
        engine.executor.shutdown()


def submit(engine: Engine, name: str = "", bias: dict[int, float] | None = None) -> int:
    sampling = SamplingConfig(temperature=1.0, seed=4, logit_bias=bias or {})
    return engine.submit(PROMPT, NUM_TOKENS, sampling_config=sampling, logits_post_processor_name=name)


def test_both_ranks_choose_the_same_tokens(engine: Engine) -> None:
    biased, free = (engine.tokens(submit(engine, "", bias)) for bias in (FAVOURITES, None))
    requests = [submit(engine, name) for name in ("favour", "batched", "", "favour", "batched")]
    assert [engine.tokens(request_id) for request_id in requests] == [biased, biased, free, biased, biased]
    assert biased != free


def test_what_fails_on_one_rank_fails_on_all(engine: Engine) -> None:
    free = engine.tokens(submit(engine))
    failing, lucky, other = submit(engine, "fail"), submit(engine, "fail_on_follower"), submit(engine)
    error = engine.final(failing)
    assert error.error_code == "INTERNAL" and "'fail' failed" in error.error_msg
    if engine.config.logits_post_processor_replicate:
        assert "'fail_on_follower' failed" in engine.final(lucky).error_msg
    else:
        assert engine.tokens(lucky) == free, "the second rank calls nothing"
    assert engine.tokens(other) == free
    assert engine.tokens(submit(engine)) == free, "the ranks go on together"


def test_the_leader_alone_decides_where_it_alone_is_asked(engine: Engine) -> None:
    if engine.config.logits_post_processor_replicate:
        pytest.skip("a function that differs from rank to rank must not be called by all of them")
    assert engine.tokens(submit(engine, "differ")) == [100] * NUM_TOKENS
    free = engine.tokens(submit(engine))
    assert engine.tokens(submit(engine)) == free
