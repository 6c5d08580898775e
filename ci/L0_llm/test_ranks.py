"""Two MPI ranks behind a tritonserver: the tokens of one rank, and service again after every way to lose a rank.

pytest ci/L0_llm/test_ranks.py
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_metrics import wait_for_rest
from server_process import ServerProcess
from waiting import until
from workload import alone, mixed_requests, together

from inflight_client import Client, ClientError, Completion, CompletionStream
from inflight_client._types import GenerationOptions

pytestmark = pytest.mark.long

STREAMS, NUM_TOKENS = 8, 150
PATIENCE = 180.0
"""Seconds after which something that should happen counts as never happening."""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ServerProcess]:
    with ServerProcess(parameters={"tensor_parallel_size": "2"}) as running:
        yield running


@pytest.fixture
def remote(two_ranks: ServerProcess) -> Iterator[Client]:
    with Client(two_ranks.grpc_url, timeout=120) as opened:
        yield opened


def rank_pids(server: ServerProcess) -> dict[int, int]:
    """rank -> pid, by what the MPI launcher put into each rank's environment."""
    ranks = {}
    for pid in server.pids:
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            program = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        number = next((entry.partition(b"=")[2] for entry in entries if entry.startswith(b"PMI_RANK=")), b"")
        if number and b"inflight.worker" in program:
            ranks[int(number)] = pid
    return ranks


class Reader(threading.Thread):
    """Reads a stream to its end and keeps what ended it."""

    def __init__(self, stream: CompletionStream) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.num_tokens = 0
        self._stream = stream
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._stream:
                self.num_tokens += len(chunk.token_ids)
                self.begun.set()
        except Exception as error:
            self.error = error


def open_streams(client: Client) -> list[Reader]:
    """Streams under way."""
    readers = [Reader(client.stream(f"Story {n}:", max_tokens=NUM_TOKENS, end_id=-1)) for n in range(STREAMS)]
    for reader in readers:
        assert reader.begun.wait(PATIENCE), reader.error
    return readers


def serve_again(server: ServerProcess, client: Client, old: dict[int, int], expected: Completion) -> None:
    """As before, from new ranks and none of the old ones, while the model stays loaded."""
    until(lambda: answers(client) == expected, "serving again")
    until(client.is_ready, "the model says so")
    assert sorted(rank_pids(server)) == [0, 1]
    until(lambda: not [pid for pid in old.values() if Path(f"/proc/{pid}").exists()], "none of the old ranks is left")
    wait_for_rest(server)


def answers(client: Client) -> Completion | None:
    try:
        return client.generate("Once upon a time", max_tokens=16)
    except ClientError:
        return None


def test_two_ranks_give_the_tokens_of_one(client: Client, remote: Client, two_ranks: ServerProcess) -> None:
    requests = mixed_requests(24, seed=4)
    expected = alone(client, requests)
    assert together(remote, requests, 12) == [expected[asked] for asked in requests]
    assert sorted(rank_pids(two_ranks)) == [0, 1]


LOOKAHEAD: GenerationOptions = {
    "lookahead_window_size": 4,
    "lookahead_ngram_size": 3,
    "lookahead_verification_set_size": 4,
}


def test_drafts_change_no_token_and_are_reported(client: Client, remote: Client) -> None:
    """On one rank and on two: looked up in the prompt, and given as what comes out without them."""
    prompt = "Tom has a red ball. Tom has a red ball. Tom has a red"
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        asked: GenerationOptions = {"max_tokens": 40, "end_id": -1, "return_perf_metrics": True, **options}
        plain = client.generate(prompt, **asked)
        assert plain.total_draft_tokens == plain.total_accepted_draft_tokens == 0
        for service in (client, remote):
            given = service.generate(prompt, **asked, draft_input_ids=plain.token_ids)
            looked_up = service.generate(prompt, **asked, max_draft_len=4, max_matching_ngram_size=1)
            ahead = service.generate(prompt, **asked, **LOOKAHEAD)
            assert given.token_ids == looked_up.token_ids == ahead.token_ids == plain.token_ids
            assert ahead.total_draft_tokens
            assert given.total_draft_tokens == given.total_accepted_draft_tokens == 38, "all but the first and the last"
            assert looked_up.total_draft_tokens and looked_up.total_accepted_draft_tokens is not None
            assert looked_up.total_accepted_draft_tokens <= looked_up.total_draft_tokens


@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)],
    ids=["follower killed", "leader killed", "follower stopped"],
)
def test_a_rank_lost_in_mid_stream(two_ranks: ServerProcess, remote: Client, rank: int, number: int) -> None:
    """The streams pause and go on; that each gets its own tokens is shown in L0_executor/test_survival.py."""
    expected = answers(remote)
    assert expected is not None
    ranks = rank_pids(two_ranks)
    readers = open_streams(remote)
    os.kill(ranks[rank], number)
    for reader in readers:
        reader.join(PATIENCE)
        assert not reader.is_alive()
        assert reader.error is None and reader.num_tokens == NUM_TOKENS
    serve_again(two_ranks, remote, ranks, expected)


def test_a_rank_lost_while_idle(two_ranks: ServerProcess, remote: Client) -> None:
    expected = answers(remote)
    assert expected is not None
    ranks = rank_pids(two_ranks)
    wait_for_rest(two_ranks)
    os.kill(ranks[0], signal.SIGKILL)
    serve_again(two_ranks, remote, ranks, expected)
