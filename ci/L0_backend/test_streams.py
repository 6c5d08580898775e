"""What clients get: pieces that make up the whole, the right tensors, and one end to every request.

pytest ci/L0_backend
"""

from __future__ import annotations

import itertools
import json
import urllib.request

import pytest
from raw_stream import RawStream
from server_process import ServerProcess

PROMPTS = ["Once upon a time", "The little dog", "naïve café 🙂", "a"]
OPTIONS = [
    {},
    {"end_id": -1},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 20.0, "seed": 7, "end_id": -1},
    {"stop_words": ["the", " a"], "end_id": -1},
    {"min_tokens": 12, "stop_words": ["e"]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pieces_make_up_the_unstreamed_answer(stream: RawStream, options: dict) -> None:
    """At temperature 20 tokens are near random, so characters come in parts."""
    for prompt in PROMPTS:
        request = {"text_input": prompt, "max_tokens": 24, "exclude_input_in_output": True, **options}
        whole = stream.ask(request)
        parts = stream.ask({**request, "stream": True})
        assert parts.text == whole.text and parts.token_ids == whole.token_ids
        assert parts.finish_reason == whole.finish_reason in ("stop", "length")
        assert len(whole.responses) == whole.num_finals == parts.num_finals == 1


def test_many_streams_at_once_equal_each_alone(stream: RawStream) -> None:
    requests = [
        {"text_input": prompt, "max_tokens": length, "stream": True, "temperature": temperature, "seed": length}
        for prompt, length, temperature in itertools.product(PROMPTS, (3, 17, 40), (0.0, 1.0))
    ]
    alone = [stream.ask(request).text for request in requests]
    together = [stream.send(request) for request in requests]
    stream.collect(*together)
    assert [answer.text for answer in together] == alone


def test_a_response_holds_what_its_flags_ask_for(stream: RawStream) -> None:
    request = {"text_input": "Once upon a time", "max_tokens": 8, "end_id": -1, "stream": True}
    plain = stream.ask(request)
    assert set(plain.responses[0]) == {"text_output", "output_ids", "sequence_length", "finish_reason"}
    assert [response["finish_reason"][0] for response in plain.responses[:-1]] == [b""] * (len(plain.responses) - 1)
    flags = ("return_log_probs", "return_num_input_tokens", "return_num_output_tokens")
    full = stream.ask({**request, **dict.fromkeys(flags, True)})
    assert full.token_ids == plain.token_ids and len(full.token_ids) == 8
    log_probs = [value for response in full.responses for value in response["output_log_probs"][0].tolist()]
    assert len(log_probs) == 8 and all(value <= 0 for value in log_probs)
    assert full.responses[-1]["cum_log_probs"][0] == pytest.approx(sum(log_probs), rel=1e-4)
    assert sum(int(response["num_output_tokens"][0]) for response in full.responses) == 8
    assert sum(int(response["sequence_length"][0]) for response in full.responses) == 8
    assert full.responses[-1]["num_input_tokens"].shape == (1,)
    only = stream.ask({**request, "stream": False}, outputs=("text_output",))
    assert set(only.responses[0]) == {"text_output"}


def test_the_prompt_comes_first_unless_it_is_excluded(stream: RawStream) -> None:
    request = {"text_input": "Once upon a time", "max_tokens": 5, "end_id": -1}
    whole = stream.ask(request)
    new = stream.ask({**request, "exclude_input_in_output": True})
    assert whole.text == "Once upon a time" + new.text
    assert len(new.token_ids) == 5 and whole.token_ids[-5:] == new.token_ids
    prompt_ids = whole.token_ids[:-5]
    by_ids = stream.ask({"input_ids": prompt_ids, "max_tokens": 5, "end_id": -1, "exclude_input_in_output": True})
    assert by_ids.token_ids == new.token_ids and by_ids.text == new.text


def test_a_stop_string_is_not_part_of_the_output(stream: RawStream) -> None:
    request = {"text_input": "Once upon a time", "max_tokens": 40, "end_id": -1, "exclude_input_in_output": True}
    text = stream.ask(request).text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = stream.ask({**request, "stop_words": ["never so", stop]})
    assert answer.text == text[: text.index(stop)] and answer.finish_reason == "stop"


def test_stop_ends_the_request_of_the_same_id(stream: RawStream, other_stream: RawStream) -> None:
    running = stream.send(
        {"text_input": "Once", "max_tokens": 2000, "end_id": -1, "stream": True}, request_id="stop me"
    )
    stream.take()
    stopped = other_stream.ask({"stop": True}, request_id="stop me")
    assert not stopped.error and not stopped.responses
    stream.collect(running)
    assert running.finish_reason == "cancelled" and 1 <= len(running.token_ids) < 2000
    again = other_stream.ask({"stop": True}, request_id="stop me again")
    assert again.error == (
        "Received stop request for requestId stop me again but it's not active (might be completed already). "
        "[INVALID_ARGUMENT]"
    )


def test_a_client_that_leaves_makes_room(narrow_server: ServerProcess) -> None:
    """One request at a time: the second is served only because the first one's client has left."""
    endless = {"text_input": "Once", "max_tokens": 500, "end_id": -1, "stream": True}
    leaving = RawStream(narrow_server.grpc_url)
    leaving.send(endless)
    leaving.take()
    leaving.close(cancel=True)
    with RawStream(narrow_server.grpc_url) as staying:
        assert staying.ask({"text_input": "Once", "max_tokens": 3, "end_id": -1}).finish_reason == "length"


def test_generate_stream_over_http(server: ServerProcess, stream: RawStream) -> None:
    body = {"text_input": "Once upon a time", "max_tokens": 12, "end_id": -1, "stream": True, "Streaming": True}
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/llm/generate_stream", json.dumps(body).encode(), {"Accept": "text/event-stream"}
    )
    with urllib.request.urlopen(request, timeout=180) as response:
        lines = response.read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert events[-1]["finish_reason"] == "length"
    whole = stream.ask(
        {"text_input": "Once upon a time", "max_tokens": 12, "end_id": -1, "exclude_input_in_output": True}
    )
    assert "".join(event["text_output"] for event in events) == whole.text
