"""Several continuations of one prompt through tritonserver: each response holds one sequence, the last one is final.

pytest ci/L0_llm/test_several_sequences.py
"""

from __future__ import annotations

import pytest
from raw_stream import Answer, RawStream
from server_metrics import Metrics, wait_for_rest
from server_process import ServerProcess
from waiting import until

from inflight.sequence_seed import sequence_seed

PROMPT = {"text_input": "Once upon a time there was a little", "temperature": 1.0, "exclude_input_in_output": True}


def tokens(answer: Answer, index: int) -> list[int]:
    return [
        token
        for response in answer.responses
        if response["sequence_index"][0] == index
        for token in response["output_ids"][0].tolist()
    ]


def text(answer: Answer, index: int) -> str:
    found = [response for response in answer.responses if response["sequence_index"][0] == index]
    return "".join(response["text_output"][0].decode() for response in found)


def ends(answer: Answer) -> list[tuple[int, str]]:
    """Sequence index and reason of every response that is its sequence's last."""
    found = [(int(r["sequence_index"][0]), r["finish_reason"][0].decode()) for r in answer.responses]
    return [(index, reason) for index, reason in found if reason]


@pytest.mark.parametrize("stream", [True, False])
def test_three_sequences_are_three_requests_of_their_own_seeds(server: ServerProcess, stream: bool) -> None:
    with RawStream(server.grpc_url) as raw:
        options = {**PROMPT, "max_tokens": 64, "end_id": -1, "stream": stream}
        asked = {**options, "seed": 7, "num_return_sequences": 3}
        answer = raw.ask(asked)
        assert not answer.error and answer.num_finals == 1
        assert sorted(ends(answer)) == [(index, "length") for index in range(3)]
        for index in range(3):
            alone = raw.ask({**options, "seed": sequence_seed(7, index)})
            assert "sequence_index" not in alone.responses[0]
            assert tokens(answer, index) == alone.token_ids and text(answer, index) == alone.text
        assert len({text(answer, index) for index in range(3)}) == 3
        if stream:  # a server whose sender is behind puts all tokens of a sequence into one response
            until(lambda: len(raw.ask(asked).responses) > 3, "sequences come in parts")
        else:
            assert len(answer.responses) == 3


def test_each_sequence_ends_by_its_own_stop_string(server: ServerProcess) -> None:
    with RawStream(server.grpc_url) as raw:
        options = {**PROMPT, "max_tokens": 40, "end_id": -1, "seed": 7, "stream": True, "num_return_sequences": 3}
        plain = raw.ask(options)
        stop = text(plain, 1)[20:24]
        answer = raw.ask({**options, "stop_words": [stop]})
        for index in range(3):
            assert text(answer, index) == text(plain, index).partition(stop)[0]
        assert (1, "stop") in ends(answer) and len(ends(answer)) == 3 and answer.num_finals == 1
    wait_for_rest(server)


def test_a_stop_and_a_client_that_leaves_end_all_sequences(server: ServerProcess) -> None:
    endless = {**PROMPT, "max_tokens": 1500, "end_id": -1, "stream": True, "num_return_sequences": 3}
    with RawStream(server.grpc_url) as raw, RawStream(server.grpc_url) as other:
        answer = raw.send(endless, request_id="three")
        while {int(response["sequence_index"][0]) for response in answer.responses} != {0, 1, 2}:
            raw.take()
        other.ask({"stop": True}, request_id="three")
        raw.collect(answer)
        assert sorted(ends(answer)) == [(index, "cancelled") for index in range(3)] and not answer.error
        assert all(0 < len(tokens(answer, index)) < 1500 for index in range(3))
    leaving = RawStream(server.grpc_url)
    leaving.send(endless)
    leaving.take()
    leaving.close(cancel=True)
    wait_for_rest(server)
    until(lambda: Metrics(server).is_at_rest, "nothing runs for a client that has left")


def test_what_cannot_be_done_is_refused_with_a_sentence(server: ServerProcess) -> None:
    prompt = {**PROMPT, "max_tokens": 4}
    with RawStream(server.grpc_url) as raw:
        for wrong in (0, -1, 65):
            error = raw.ask({**prompt, "num_return_sequences": wrong}).error
            assert f"num_return_sequences must be between 1 and max_batch_size 64, got {wrong}" in error
        assert len(raw.ask({**prompt, "beam_width": 1}).token_ids) == 4
