"""Real ranks, started with MPI and without it, on our own checkpoint: same tokens, and every kind of failure."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from real_engine import (
    CHECKPOINT,
    IDLE_SHARE,
    PATIENCE,
    Engine,
    listening_addresses,
    mapped_files,
    receive_tokens,
    wait_for_end,
    wait_until_idle,
)

from inflight.errors import ConfigurationError
from inflight.executor.wire.messages import (
    FRONT_ID_SHIFT,
    MAX_FRONT_ID,
    Hello,
    Submit,
    Welcome,
    decode_from_leader,
    encode,
)
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.request import Request
from inflight.run_directory import RUN_DIRECTORY
from inflight.sampling_config import SamplingConfig
from inflight.sequence_seed import sequence_seed

PROMPTS = [[10, 20, 30], list(range(40, 75)), [7], [90, 91, 90, 91, 90, 91]]
LONG = 200
"""Tokens: enough that a request is still in flight when something is done to it."""
IDLE_WAKES = 20
"""A second, for all processes of an idle engine together."""
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
GARBAGE = (b"", b"\xc1\xc1", bytes(1_000_000), b"\x81\xa4type\xa6Submit", encode(Hello(front_id=1, pid=1))[:-1])
MANY, NEW = 24, 64
"""Requests, and tokens of each."""

WITHOUT_MPI = {"executor": "multiproc", "tensor_parallel_size": "2"}

StartEngine = Callable[..., Engine]


@contextmanager
def starting() -> Iterator[StartEngine]:
    """Starts engines, and ends them: no process and no file of theirs may be left. (That they share no memory
    with a name, has a test of its own: in /dev/shm other tests' ranks come and go.)"""
    engines: list[Engine] = []
    run_directory = Path(tempfile.mkdtemp(prefix="run-"))  # a name that is short enough for a socket's address

    def start(**parameters: str) -> Engine:
        engine = Engine(run_directory, **parameters)
        engines.append(engine)
        engine.executor.start()
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, str(run_directory))
        try:
            yield start
        finally:
            for engine in engines:
                engine.executor.shutdown()
    assert [engine.executor.engine_pids() for engine in engines] == [[] for _ in engines]
    assert list(run_directory.iterdir()) == []
    shutil.rmtree(run_directory)


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with starting() as start:
        yield start


@pytest.fixture(params=["mpi", "multiproc"])
def two_ranks(start_engine: StartEngine, request: pytest.FixtureRequest) -> Engine:
    """For a test that breaks it."""
    return start_engine(tensor_parallel_size="2", executor=request.param)


@pytest.fixture(scope="module", params=["mpi", "multiproc"])
def shared_ranks(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Two ranks for tests that break nothing."""
    with starting() as start:
        yield start(tensor_parallel_size="2", executor=request.param)


def test_tokens_do_not_depend_on_the_number_of_ranks(start_engine: StartEngine) -> None:
    # In float32: the order of a sum decides the last digit, which in bfloat16 is coarse enough to change a draw.
    one, two = start_engine(dtype="float32"), start_engine(dtype="float32", tensor_parallel_size="2")
    two_without_mpi = start_engine(dtype="float32", **WITHOUT_MPI)
    for seed in (None, 5):
        expected = one.generate(PROMPTS, 24, seed)
        assert two.generate(PROMPTS, 24, seed) == expected
        assert two_without_mpi.generate(PROMPTS, 24, seed) == expected


def test_two_ranks_give_every_sequence_of_a_request_its_own_tokens(start_engine: StartEngine) -> None:
    """Those of requests of their own on one rank; the prompts' blocks are shared and copied on both ranks."""
    one, two = start_engine(dtype="float32"), start_engine(dtype="float32", tensor_parallel_size="2")
    ids = [two.submit(prompt, 24, seed=5, streaming=True, num_return_sequences=3) for prompt in PROMPTS]
    for index in range(3):
        expected = one.generate(PROMPTS, 24, seed=sequence_seed(5, index))
        assert [two.tokens(request_id, index) for request_id in ids] == expected


def test_beams_do_not_depend_on_the_number_of_ranks(start_engine: StartEngine) -> None:
    """Each rank chooses for itself, and forks the same blocks; beside greedy and sampled requests."""
    found = []
    for num_ranks in ("1", "2"):
        engine = start_engine(dtype="float32", tensor_parallel_size=num_ranks, max_num_tokens="16")
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


def test_tensors_and_choices_do_not_depend_on_the_number_of_ranks(start_engine: StartEngine) -> None:
    """Streamed and not, beside requests that ask for nothing; the numbers come through the socket as they are."""
    found = []
    for num_ranks in ("1", "2"):
        engine = start_engine(dtype="float32", tensor_parallel_size=num_ranks, max_num_tokens="16")
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
    for one, two in zip(tensors, tensors_of_two, strict=True):
        assert set(two) == set(one)
        for name, array in one.items():
            np.testing.assert_allclose(two[name], array, rtol=0, atol=1e-3, err_msg=name)
    limits = engine.executor.limits
    assert tensors[0]["context_logits"].shape == (len(PROMPTS[0]), limits.vocab_size)
    assert tensors[0]["generation_logits"].shape == (12, limits.vocab_size)
    assert tensors[0]["hidden_states"].shape == (12, limits.hidden_size)
    assert all(not each for each in tensors[len(SAMPLINGS) :])


def test_two_ranks_of_one_thread_serve_many_requests(start_engine: StartEngine) -> None:
    rng = random.Random(24)
    prompts = [[rng.randrange(5, 2000) for _ in range(rng.randrange(1, 40))] for _ in range(MANY)]
    one = start_engine(dtype="float32", num_threads="2")
    two = start_engine(dtype="float32", num_threads="1", tensor_parallel_size="2")
    assert two.generate(prompts, NEW) == one.generate(prompts, NEW)


def test_two_ranks_without_a_compiler_give_the_same_tokens(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = start_engine(dtype="float32", tensor_parallel_size="2")
    monkeypatch.setenv("CXX", "no-such-compiler")
    sockets = start_engine(dtype="float32", tensor_parallel_size="2")
    assert sockets.generate(PROMPTS, 24) == shared.generate(PROMPTS, 24)
    pids = sockets.executor.engine_pids()
    assert {address for pid in pids for address in listening_addresses(pid)} <= LOOPBACK


def test_one_rank_under_mpi_is_an_engine_too(start_engine: StartEngine) -> None:
    alone, under_mpi = start_engine(), start_engine(executor="mpi")
    assert under_mpi.generate(PROMPTS, 8) == alone.generate(PROMPTS, 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_idle_is_replaced(two_ranks: Engine, rank: int) -> None:
    before = two_ranks.generate(PROMPTS, 8)
    os.kill(two_ranks.rank_pid(rank), signal.SIGKILL)
    assert two_ranks.deaths.acquire(timeout=PATIENCE)
    two_ranks.wait_until_ready()
    assert two_ranks.generate(PROMPTS, 8) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_where_requests_do_not_go_on_a_dead_rank_costs_each_one_error(start_engine: StartEngine, rank: int) -> None:
    """That they do otherwise is shown in test_survival.py."""
    engine = start_engine(tensor_parallel_size="2", journal_max_tokens="0")
    old = set(engine.executor.engine_pids())
    ids = [engine.submit(prompt, LONG, streaming=True) for prompt in PROMPTS]
    engine.wait_for_first(ids)
    os.kill(engine.rank_pid(rank), signal.SIGKILL)
    assert [engine.final(id_).error_code for id_ in ids] == ["UNAVAILABLE"] * len(ids)
    engine.wait_until_ready()
    assert not old & set(engine.executor.engine_pids())
    assert len(engine.generate(PROMPTS, 8)) == len(PROMPTS)


def test_requests_go_on_when_ranks_without_mpi_die(start_engine: StartEngine) -> None:
    engine = start_engine(dtype="float32", **WITHOUT_MPI)
    expected = engine.generate(PROMPTS, LONG, seed=5)
    for rank in (0, 1):
        ids = [engine.submit(prompt, LONG, seed=5, streaming=True) for prompt in PROMPTS]
        engine.wait_for_first(ids)
        os.kill(engine.rank_pid(rank), signal.SIGKILL)
        assert [engine.tokens(id_) for id_ in ids] == expected
        assert engine.deaths.acquire(timeout=PATIENCE)


@pytest.mark.parametrize(("rank", "executor"), [(0, "mpi"), (1, "mpi"), (0, "multiproc"), (1, "multiproc")])
def test_a_frozen_rank_is_replaced_after_the_heartbeats_deadline(
    start_engine: StartEngine, rank: int, executor: str
) -> None:
    engine = start_engine(tensor_parallel_size="2", executor=executor, worker_heartbeat_timeout_ms="3000")
    expected = engine.generate(PROMPTS[:1], 16)
    frozen = engine.rank_pid(rank)
    os.kill(frozen, signal.SIGSTOP)
    assert [engine.tokens(engine.submit(PROMPTS[0], 16))] == expected
    assert frozen not in engine.executor.engine_pids()


def test_a_rank_that_was_frozen_for_less_goes_on(start_engine: StartEngine) -> None:
    engine = start_engine(tensor_parallel_size="2", worker_heartbeat_timeout_ms="60000")
    expected = engine.generate(PROMPTS[:1], 16)
    follower = engine.rank_pid(1)
    os.kill(follower, signal.SIGSTOP)
    try:
        request_id = engine.submit(PROMPTS[0], 16)
        assert engine.executor.await_responses(timeout=1) == []
    finally:
        os.kill(follower, signal.SIGCONT)
    assert [engine.tokens(request_id)] == expected
    assert not engine.deaths.acquire(blocking=False)


def test_ranks_that_cannot_load_say_why(start_engine: StartEngine, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=missing):
        start_engine(tensor_parallel_size="2", gpt_model_path=missing)


def test_an_idle_engine_costs_nothing(shared_ranks: Engine) -> None:
    shared_ranks.generate(PROMPTS, 4)
    pids = shared_ranks.executor.engine_pids()
    wait_until_idle(pids, IDLE_WAKES, IDLE_SHARE)
    assert shared_ranks.executor.await_responses(timeout=0) == []


def test_ranks_of_one_machine_share_no_port_and_nothing_with_a_name(shared_ranks: Engine) -> None:
    """So no other user can reach what they exchange, and nothing is left when they are killed."""
    shared_ranks.generate(PROMPTS, 4)
    pids = shared_ranks.executor.engine_pids()
    assert len(pids) >= 2
    assert not {address for pid in pids for address in listening_addresses(pid)}
    for rank in (0, 1):
        mapped = mapped_files(shared_ranks.rank_pid(rank))
        assert "/memfd:inflight-ranks (deleted)" in mapped
        assert not [name for name in mapped if name.startswith("/dev/shm/") and not name.endswith("(deleted)")]


def test_two_fronts_share_one_engine(shared_ranks: Engine) -> None:
    first_front = shared_ranks.executor.next_request_id() >> FRONT_ID_SHIFT
    second_front = first_front % MAX_FRONT_ID + 1
    with zmq.Context() as context, context.socket(zmq.DEALER) as second:
        second.setsockopt(zmq.LINGER, 0)
        second.setsockopt(zmq.RCVTIMEO, PATIENCE * 1000)
        second.connect(shared_ranks.endpoint())
        second.send(encode(Hello(front_id=second_front, pid=os.getpid())))
        welcome = decode_from_leader(second.recv())
        assert isinstance(welcome, Welcome)
        request_id = second_front << FRONT_ID_SHIFT | 1
        second.send(encode(Submit([Request(request_id=request_id, input_token_ids=PROMPTS[0], max_tokens=12)])))
        expected = shared_ranks.generate(PROMPTS[:1], 12)
        assert [receive_tokens(second, request_id)] == expected


def test_garbage_from_a_stranger_harms_nobody(shared_ranks: Engine) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(shared_ranks.endpoint())
        for frame in GARBAGE * 20:
            stranger.send(frame)
            stranger.send_multipart([frame, frame])
        assert len(shared_ranks.generate(PROMPTS, 8)) == len(PROMPTS)
        stranger.setsockopt(zmq.LINGER, 0)
    assert not shared_ranks.deaths.acquire(blocking=False)


FRONT = """
import sys
from inflight.config import EngineConfig
from inflight.executor.executor import Executor
executor = Executor(config=EngineConfig.from_parameters(dict(item.split("=", 1) for item in sys.argv[1:])))
print(*executor.engine_pids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("executor", ["mpi", "multiproc"])
def test_no_rank_outlives_a_front_that_was_killed(executor: str) -> None:
    ranks = {"executor": executor, "tensor_parallel_size": 2}
    parameters = {"gpt_model_path": CHECKPOINT, "cpu_compile": "false", **ranks}
    command = [sys.executable, "-c", FRONT, *(f"{key}={value}" for key, value in parameters.items())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        tempfile.TemporaryDirectory(prefix="run-") as run_directory,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, RUN_DIRECTORY: run_directory},
        ) as front,
    ):
        assert front.stdout is not None
        pids = [int(word) for word in front.stdout.readline().split()]
        front.kill()
        assert len(pids) >= 2
        for pid in pids:
            wait_for_end(pid)
