"""Wrong requests of every kind: each gets its own error at once, and other requests are unaffected.

pytest ci/L0_backend/test_faults.py
"""

from __future__ import annotations

import numpy as np
import pytest
from raw_stream import RawStream
from server_metrics import read_metrics
from server_process import ServerProcess
from wrong_values import WRONG_REQUESTS, WRONG_SAMPLING

PROMPT = {"text_input": "Once upon a time", "max_tokens": 40, "end_id": -1, "exclude_input_in_output": True}

FAULTS = {
    "prompt too long": ({**PROMPT, "text_input": "word " * 4000}, "more than max_input_len"),
    "prompt of bytes that cannot fit": (
        {**PROMPT, "text_input": "word " * 10_000},
        "50000 bytes, which make more than",
    ),
    "prompt of too many bytes": ({**PROMPT, "text_input": "x" * 2_000_000}, "text_input has 2000000 bytes"),
    "empty prompt": ({**PROMPT, "text_input": ""}, "the prompt is empty"),
    "no tokens": ({"input_ids": [], "max_tokens": 4}, "the prompt is empty"),
    "no prompt": ({"max_tokens": 4, "top_k": 1}, "text_input or input_ids or prompt_embeds is required"),
    "two prompts": ({**PROMPT, "input_ids": [5]}, "exclude each other"),
    "no max_tokens": ({"text_input": "a"}, "max_tokens is required"),
    "token -1": ({"input_ids": [5, -1], "max_tokens": 4}, "token id -1 is outside the vocabulary"),
    "token too large": ({"input_ids": [5, 10**6], "max_tokens": 4}, "token id 1000000 is outside the vocabulary"),
    "not UTF-8": ({**PROMPT, "text_input": b"\xff\xfe\x00"}, "not valid UTF-8"),
    "10^5 stop words": ({**PROMPT, "stop_words": ["x"] * 100_000}, "stop_words has 100000 entries"),
    "10 MB stop word": ({**PROMPT, "stop_words": ["x" * 10_000_000]}, "stop_words holds 10000000 bytes"),
    "two rows of tokens": ({"input_ids": np.ones((1, 2), np.int32), "max_tokens": 4}, "unexpected shape"),
    "stop without id": ({"stop": True}, "not active"),
    "repetition_penalty 0": ({**PROMPT, "repetition_penalty": 0.0}, "repetition_penalty must be"),
    **{
        str(wrong): ({**PROMPT, wrong.field: wrong.value}, f"{wrong.field} must be")
        for wrong in (*WRONG_SAMPLING, *WRONG_REQUESTS)
        if wrong.field in ("max_tokens", "temperature", "top_p", "top_k")
    },
}


@pytest.mark.parametrize(("bad", "sentence"), FAULTS.values(), ids=FAULTS)
def test_one_bad_among_good(stream: RawStream, other_stream: RawStream, bad: dict, sentence: str) -> None:
    expected = stream.ask(PROMPT).text
    neighbours = [stream.send({**PROMPT, "stream": number % 2 == 0}) for number in range(7)]
    answer = other_stream.ask(bad)
    assert sentence in answer.error and len(answer.error) < 512 and "\n" not in answer.error
    assert not answer.responses and answer.num_finals == 1
    stream.collect(*neighbours)
    assert [neighbour.text for neighbour in neighbours] == [expected] * 7


def test_a_live_id_is_refused_and_its_first_owner_unharmed(narrow_server: ServerProcess) -> None:
    request = {**PROMPT, "stream": True}
    with RawStream(narrow_server.grpc_url) as stream, RawStream(narrow_server.grpc_url) as other:
        with narrow_server.hold_ranks():
            first = stream.send(request, request_id="same")
            # Requests of one stream arrive in order: once this one is refused, the one before it is in flight.
            assert stream.ask({"max_tokens": 1}).error
            second = other.ask(request, request_id="same")
        assert second.error == "requestId same is already in progress, request is ignored. [ALREADY_EXISTS]"
        stream.collect(first)
        assert len(first.token_ids) == 40 and not first.error
        assert len(other.ask({**PROMPT, "max_tokens": 3}, request_id="same").token_ids) == 3


def test_a_full_queue_refuses_at_once(narrow_server: ServerProcess) -> None:
    """One is served and one waits, so the third is refused; requests of one stream arrive in order. The ranks stand
    still meanwhile, so that none has ended when the third comes."""
    request = {**PROMPT, "stream": True}
    with RawStream(narrow_server.grpc_url) as stream:
        with narrow_server.hold_ranks():
            served, waiting, third = (stream.send(request) for _ in range(3))
            refused = stream.collect(third)
        assert refused.error.startswith("Exceeds maximum queue size")
        stream.collect(served, waiting)
        assert served.text == waiting.text and len(waiting.token_ids) == 40


def test_a_request_that_can_never_fit_is_refused(narrow_server: ServerProcess) -> None:
    with RawStream(narrow_server.grpc_url) as stream:
        refused = stream.ask({**PROMPT, "max_tokens": 1000})
        assert "more than the whole KV cache holds" in refused.error
        assert stream.ask({**PROMPT, "max_tokens": 100}).finish_reason == "length"


def test_no_prompt_reaches_the_log_or_the_metrics(server: ServerProcess, stream: RawStream) -> None:
    canary = "xylophone-canary-4711"
    stream.ask({**PROMPT, "text_input": canary})
    for inputs in ({"text_input": canary, "max_tokens": 0}, {**PROMPT, "text_input": canary.encode() + b"\xff"}):
        assert canary not in stream.ask(inputs).error
    stream.ask({"stop": True}, request_id=f"{canary}\n[ERROR] forged line")
    assert canary not in server.log and canary not in read_metrics(server)
    assert "\n[ERROR] forged" not in server.log
