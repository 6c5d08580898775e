"""Grammars on two ranks: the masks reach both, and ranks that died are replaced.

pytest ci/L0_executor/test_guided_ranks.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from guides import BOMBS, GUIDES
from real_engine import CHECKPOINT, PATIENCE, Engine

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams
from inflight.request import Request
from inflight.run_directory import RUN_DIRECTORY
from inflight.sampling_config import SamplingConfig
from inflight.text.tokenizer import Tokenizer

PROMPT, END = [10, 20, 30], 2


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    run_directory = Path(tempfile.mkdtemp(prefix="run-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, str(run_directory))
        engine = Engine(run_directory, tensor_parallel_size="2", dtype="float32")
        engine.executor.start()
        yield engine
        engine.executor.shutdown()


def submit(engine: Engine, params: GuidedDecodingParams, seed: int) -> int:
    request = Request(
        request_id=engine.executor.next_request_id(),
        input_token_ids=PROMPT,
        max_tokens=250,
        end_ids=[END],
        streaming=seed % 2 == 0,
        sampling_config=SamplingConfig(temperature=1.0, seed=seed),
        guided_decoding_params=params,
    )
    engine._mail[request.request_id] = []
    engine.executor.enqueue_request(request)
    return request.request_id


def test_outputs_parse_beside_free_ones_and_bombs(engine: Engine) -> None:
    tokenizer = Tokenizer.load(CHECKPOINT)
    (free,) = engine.generate([PROMPT], 40, seed=1)
    names = [name for name in GUIDES if name != "json"]
    guided = {(name, seed): submit(engine, GUIDES[name][0], seed) for name in names for seed in range(1, 5)}
    for name in ("nested repetitions", "no grammar"):
        with pytest.raises(InvalidRequest):
            submit(engine, BOMBS[name], 1)
    assert engine.generate([PROMPT], 40, seed=1) == [free]
    for (name, _), request_id in guided.items():
        tokens = engine.tokens(request_id)
        if tokens[-1] == END:
            text = tokenizer.join([tokenizer.token(token) for token in tokens[:-1]])
            assert GUIDES[name][1](text), text
        else:
            assert len(tokens) == 250


def test_a_guided_stream_goes_on_with_the_same_tokens_when_the_leader_is_killed(engine: Engine) -> None:
    """Its grammar is compiled again, and its output taken in from its tokens."""
    expected = engine.tokens(submit(engine, GUIDES["regex"][0], 3))
    leader = engine.rank_pid(0)
    assert not Path(f"/proc/{leader}/task/{leader}/children").read_text(), "grammars need no processes"
    running = submit(engine, GUIDES["json_schema"][0], 4)
    os.kill(leader, signal.SIGKILL)
    assert engine.deaths.acquire(timeout=PATIENCE)
    engine.wait_until_ready()
    assert engine.tokens(running) == engine.tokens(submit(engine, GUIDES["json_schema"][0], 4))
    assert engine.tokens(submit(engine, GUIDES["regex"][0], 3)) == expected
