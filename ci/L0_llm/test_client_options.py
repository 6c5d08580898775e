"""What our client offers of the model `llm` beyond text: several sequences, log probabilities, biases, command line.

pytest ci/L0_llm/test_client_options.py
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from server_metrics import Metrics, wait_for_rest, wait_until_settled
from server_process import ServerProcess
from waiting import until

from inflight_client import AsyncClient, Client, InvalidRequest
from inflight_client._types import GenerationOptions

PROMPT = "Once upon a time there was a little"
SEVERAL: GenerationOptions = {
    "max_tokens": 12,
    "temperature": 1.0,
    "seed": 7,
    "end_id": -1,
    "num_return_sequences": 3,
    "return_log_probs": True,
    "num_log_probs": 4,
    "return_prompt_log_probs": True,
}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.grpc_url, timeout=120) as opened:
        yield opened


def test_several_sequences_are_the_same_streamed_whole_and_async(server: ServerProcess, client: Client) -> None:
    whole = client.generate(PROMPT, **SEVERAL)
    stream = client.stream(PROMPT, **SEVERAL)
    chunks = list(stream)

    async def ask() -> tuple[str, ...]:
        async with AsyncClient(server.grpc_url, timeout=120) as remote:
            return tuple(sequence.text for sequence in (await remote.generate(PROMPT, **SEVERAL)).sequences)

    texts = tuple(sequence.text for sequence in whole.sequences)
    assert len(set(texts)) == 3
    assert tuple(sequence.text for sequence in stream.completion.sequences) == texts == asyncio.run(ask())
    assert [sequence.token_ids for sequence in stream.completion.sequences] == [s.token_ids for s in whole.sequences]
    assert sorted(chunk.sequence_index for chunk in chunks if chunk.finish_reason) == [0, 1, 2]
    alone = client.generate(PROMPT, **{**SEVERAL, "num_return_sequences": None})
    assert (alone.text, alone.token_ids) == (whole.text, whole.token_ids) and len(alone.sequences) == 1


def test_log_probabilities_fit_their_tokens(client: Client) -> None:
    completion = client.generate(PROMPT, **SEVERAL)
    assert completion.num_input_tokens is not None
    assert len(completion.prompt_log_probs) == len(completion.prompt_top_log_probs) == completion.num_input_tokens - 1
    for sequence in completion.sequences:
        assert len(sequence.token_ids) == len(sequence.log_probs) == len(sequence.top_log_probs) == 12
        for token, log_prob, top in zip(sequence.token_ids, sequence.log_probs, sequence.top_log_probs, strict=True):
            values = [other.log_prob for other in top]
            assert len(top) == 4 and values == sorted(values, reverse=True)
            found = dict(top)
            assert log_prob <= values[0] and found.get(token, log_prob) == pytest.approx(log_prob, abs=1e-4)


def test_a_bias_decides_the_tokens(client: Client) -> None:
    assert client.generate(PROMPT, max_tokens=3, end_id=-1, logit_bias={74: 100.0}).token_ids == (74, 74, 74)
    with pytest.raises(InvalidRequest, match="logit_bias names token id 1000000, which is outside"):
        client.generate(PROMPT, logit_bias={1_000_000: 1.0})
    with pytest.raises(InvalidRequest, match="num_return_sequences must be between 1 and max_batch_size 64, got 65"):
        client.generate(PROMPT, num_return_sequences=65)


def test_leaving_after_one_sequence_has_ended_cancels_the_others(server: ServerProcess, client: Client) -> None:
    options: GenerationOptions = {**SEVERAL, "max_tokens": 1500, "num_log_probs": None, "return_log_probs": False}
    plain = client.generate(PROMPT, **{**options, "max_tokens": 40})
    stop = next(
        word
        for word in plain.sequences[1].text.split()
        if not any(word in plain.sequences[other].text for other in (0, 2))
    )
    before = wait_until_settled(server).of("inflight_requests_total", outcome="cancelled")
    with client.stream(PROMPT, **{**options, "stop_words": [stop]}) as stream:
        while next(stream).finish_reason is None:
            pass
    until(
        lambda: Metrics(server).of("inflight_requests_total", outcome="cancelled") == before + 1,
        "the rest of the request is cancelled",
    )
    wait_for_rest(server)


def test_the_command_prints_sequences_and_log_probabilities(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "inflight_client.cli", "generate", PROMPT, "--url", server.grpc_url]
    options = [
        "--max-tokens",
        "3",
        "--temperature",
        "1",
        "--seed",
        "7",
        "--num-return-sequences",
        "2",
        "--log-probs",
        "2",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[sequence 0]", "[sequence 1]"] * 2
    assert sum(len(line.split()) == 6 for line in lines[4:]) == 6
