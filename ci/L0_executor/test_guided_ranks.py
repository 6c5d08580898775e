"""Grammars on two ranks: the masks reach both, a refused row ends on both, and ranks that died are replaced.

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
from real_engine import CHECKPOINT, PATIENCE, Engine, wait_for_end

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
    bombs = [submit(engine, BOMBS[name], 1) for name in ("nested repetitions", "no grammar")]
    assert engine.generate([PROMPT], 40, seed=1) == [free]
    for (name, _), request_id in guided.items():
        tokens = engine.tokens(request_id)
        if tokens[-1] == END:
            text = tokenizer.join([tokenizer.token(token) for token in tokens[:-1]])
            assert GUIDES[name][1](text), text
        else:
            assert len(tokens) == 250
    for request_id in bombs:
        assert engine.final(request_id).error_code == "INVALID_ARGUMENT"


def test_the_processes_of_grammars_end_with_the_leader(engine: Engine) -> None:
    expected = engine.tokens(submit(engine, GUIDES["regex"][0], 3))
    leader = engine.rank_pid(0)
    (server,) = (int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split())
    Path(f"/proc/{server}/cmdline").read_bytes().index(b"grammar_server")
    os.kill(leader, signal.SIGKILL)
    assert engine.deaths.acquire(timeout=PATIENCE)
    wait_for_end(server)
    engine.wait_until_ready()
    assert engine.tokens(submit(engine, GUIDES["regex"][0], 3)) == expected
