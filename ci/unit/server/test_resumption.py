"""Streams that go on in another server: text and tokens join as if one server had answered.

pytest ci/unit/server/test_resumption.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from calls import until
from fake_executor import FakeExecutor
from fake_pb_utils import ResponseSender
from played_backend import LONG

from inflight.checkpoint_digest import checkpoint_digest, system_fingerprint
from inflight.engine_description import EngineDescription
from inflight.result import FinishReason, Response, Result
from inflight.server.resume_token import Part, ResumeToken, ResumeTokenWriter
from inflight.server.sequence_output import SequenceOutput

PROMPT = {"text_input": "AB", "max_tokens": 40, "stream": True, "return_resume_token": True}


def say(executor: FakeExecutor, text: bytes, index: int = 0, **fields: Any) -> None:
    result = Result(output_token_ids=list(text), sequence_index=index, **fields)
    executor.push(Response(request_id=executor.last.request_id, result=result))


def end(executor: FakeExecutor, text: bytes = b"", index: int = 0, **fields: Any) -> None:
    say(executor, text, index, finish_reason=FinishReason.LENGTH, is_sequence_final=True, is_final=True, **fields)


def token_of(*senders: ResponseSender) -> str:
    return "".join(response["resume_token"] for sender in senders for response in sender.responses)


def ids_of(*senders: ResponseSender) -> list[int]:
    return [token for sender in senders for response in sender.responses for token in response["output_ids"][0]]


def hear(sender: ResponseSender, number: int) -> None:
    until(lambda: len(sender.responses) == number, f"response {number}")


def test_a_stream_goes_on_with_the_text_that_its_first_server_held_back(ask, executor: FakeExecutor) -> None:
    """Half a character and the beginning of a stop string are in delivered tokens, but not in the delivered text."""
    request = {**PROMPT, "stop_words": ["xyz"], "input_ids": [65, 66]}
    del request["text_input"]
    first = ask(request)
    say(executor, b"a" + "é".encode()[:1])
    hear(first, 1)
    say(executor, "é".encode()[1:] + b"bx")
    hear(first, 2)
    again = ask({**request, "resume_token": token_of(first)})
    replay = executor.last.replay
    assert replay is not None and replay.is_resumed
    (sequence,) = replay.sequences
    assert sequence.token_ids == list("aébx".encode())
    assert [response["text_output"] for response in first.responses] == ["a", "éb"]
    say(executor, b"yw")
    hear(again, 1)
    once_more = ask({**request, "resume_token": token_of(first, again)})
    say(executor, b"xyz")
    assert once_more.finished.wait(LONG)
    assert first.text + again.text + once_more.text == "aébxyw"
    assert once_more.responses[-1]["finish_reason"] == "stop"
    assert bytes(ids_of(first, again, once_more)) == "aébxywxyz".encode()


def test_sums_of_log_probabilities_and_finished_sequences_are_kept(ask, executor: FakeExecutor) -> None:
    request = {**PROMPT, "num_return_sequences": 2, "return_log_probs": True, "temperature": 1.0}
    first = ask(request)
    seed = executor.last.sampling_config.seed
    say(executor, b"a", 0, log_probs=[-0.1], cum_log_prob=-0.1)
    hear(first, 1)
    say(
        executor,
        b"b",
        1,
        log_probs=[-0.2],
        cum_log_prob=-0.2,
        finish_reason=FinishReason.END_ID,
        is_sequence_final=True,
    )
    hear(first, 2)
    again = ask({**request, "resume_token": token_of(first)})
    assert executor.last.sampling_config.seed == seed, "a seed that the server has drawn is part of the token"
    one, other = executor.last.replay.sequences
    assert (one.token_ids, one.cum_log_prob, one.is_finished) == ([97], -0.1, False)
    assert (other.token_ids, other.is_finished) == ([98], True)
    end(executor, b"c", 0, log_probs=[-0.3], cum_log_prob=-0.4)
    assert again.finished.wait(LONG)
    (response,) = again.responses
    assert response["text_output"] == "c" and response["cum_log_probs"] == [pytest.approx(-0.4)]
    assert response["sequence_index"] == [0]


def test_no_token_is_sent_unless_it_is_asked_for(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "return_resume_token": False})
    end(executor, b"a")
    assert sender.finished.wait(LONG)
    assert "resume_token" not in sender.responses[0].names()


def test_beams_have_no_token(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "beam_width": 2})
    end(executor, b"a")
    assert sender.finished.wait(LONG)
    assert "resume_token" not in sender.responses[0].names()


def test_an_empty_token_is_none(ask, executor: FakeExecutor) -> None:
    ask({**PROMPT, "resume_token": ""})
    assert executor.last.replay is None
    end(executor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_input": "AC"}, "of another request: send it with the same inputs"),
        ({"max_tokens": 41}, "of another request: send it with the same inputs"),
        ({"temperature": 0.5}, "of another request: send it with the same inputs"),
        ({"stop_words": ["q"]}, "of another request: send it with the same inputs"),
        ({"seed": 3}, "of another request: send it with the same inputs"),
        ({"stream": False}, "of another request: send it with the same inputs"),
        ({"beam_width": 2}, "beam_width above 1"),
        ({"resume_token": "1:abc."}, "resume_token is damaged"),
        ({"resume_token": "x" * 2**20}, "resume_token has 1048576 bytes"),
    ],
)
def test_a_token_that_does_not_fit_is_refused(ask, executor: FakeExecutor, change: dict, words: str) -> None:
    first = ask(PROMPT)
    say(executor, b"a")
    hear(first, 1)
    again = ask({**PROMPT, "resume_token": token_of(first), **change})
    assert again.finished.wait(LONG)
    message = again.error.message()
    assert words in message and message.endswith("[INVALID_ARGUMENT]")
    end(executor)


def test_a_request_may_change_in_what_decides_no_token(ask, executor: FakeExecutor) -> None:
    first = ask(PROMPT, request_id="1", parameters='{"request_priority": 0.1, "allotted_time_ms": 100000}')
    say(executor, b"a")
    hear(first, 1)
    again = ask({**PROMPT, "resume_token": token_of(first)}, request_id="2", parameters='{"request_priority": 0.9}')
    assert again.error is None and executor.last.replay is not None
    end(executor, b"b")


def test_tokens_that_the_vocabulary_does_not_have_are_refused(ask, executor: FakeExecutor) -> None:
    first = ask(PROMPT)
    executor.push(Response(request_id=executor.last.request_id, result=Result(output_token_ids=[65, 2**31 - 1])))
    hear(first, 1)
    again = ask({**PROMPT, "resume_token": token_of(first)})
    assert again.finished.wait(LONG)
    assert "resume_token holds a token id outside" in again.error.message()
    end(executor)


def test_no_text_is_made_of_more_tokens_than_the_request_can_have(
    ask, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(PROMPT)
    say(executor, b"a")
    hear(first, 1)
    writer = ResumeTokenWriter(ResumeToken.parse(token_of(first), 10).head)
    forged = writer.write(
        Part(sequence_index=0, token_ids=[97] * 41, cum_log_prob=None, finish_reason=FinishReason.NOT_FINISHED)
    )
    monkeypatch.setattr(SequenceOutput, "resume", None)  # which would make text of them
    again = ask({**PROMPT, "resume_token": forged})
    assert again.finished.wait(LONG)
    assert "resume_token has 41 tokens, more than the request can generate" in again.error.message()
    end(executor)


def test_a_checkpoint_is_known_by_its_files(tmp_path: Path) -> None:
    description = EngineDescription(device="cpu", dtype="float32")

    def digest(**changes: str) -> bytes:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        files = {"config.json": "{}", "model.safetensors": "w" * 100_000, **changes}
        for name, content in files.items():
            (folder / name).write_text(content)
        return checkpoint_digest((str(folder), str(folder)), description)

    one = digest()
    assert digest() == one and digest(**{"notes.md": "other"}) == one
    assert digest(**{"model.safetensors": "w" * 99_999 + "v"}) != one
    assert digest(**{"config.json": "[]"}) != one
    folder = str(tmp_path / "0")
    other = EngineDescription(device="cpu", dtype="bfloat16", checkpoint="renamed")
    assert checkpoint_digest((folder,), other) != one == checkpoint_digest((folder,), description)


def test_a_fingerprint_follows_what_may_change_a_bit_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def fingerprint(**fields: Any) -> str:
        return system_fingerprint((str(tmp_path), ""), EngineDescription(device="cpu", **fields))

    one = fingerprint(dtype="float32")
    assert re.fullmatch(r"fp_[0-9a-f]{12}", one)
    same: dict[str, Any] = {"num_ranks": 2, "data_parallel_size": 2, "checkpoint": "renamed"}
    assert fingerprint(dtype="float32", **same) == one
    changes: list[dict[str, Any]] = [
        *({"layers": "compiled"}, {"deterministic": True}, {"tensor_parallel_size": 2}, {"device_name": "Zen"}),
        *({"weight_dtype": "int4"}, {"kv_cache_dtype": "fp8"}, {"torch_version": "3"}, {"inflight_version": "9"}),
    ]
    assert len({one, *(fingerprint(dtype="float32", **change) for change in changes)}) == 1 + len(changes)
    system_fingerprint.cache_clear()
    assert fingerprint(dtype="float32") == one
    (tmp_path / "config.json").write_text("[]")
    system_fingerprint.cache_clear()
    assert fingerprint(dtype="float32") != one


def test_what_adds_up_decides_the_tokens_of_coarse_types_only() -> None:
    def digest(**fields: Any) -> bytes:
        return checkpoint_digest((), EngineDescription(device="cpu", **fields))

    adders: list[dict[str, Any]] = [{"layers": "compiled"}, {"deterministic": True}, {"tensor_parallel_size": 2}]
    assert len({digest(dtype="bfloat16", **adder) for adder in ({}, *adders)}) == 4
    assert len({digest(dtype="float32", **adder) for adder in ({}, *adders)}) == 1
    for rounded in ("kv_cache_dtype", "weight_dtype"):
        assert len({digest(dtype="float32", **{rounded: "fp8"}, **adder) for adder in ({}, *adders)}) == 4
    assert digest(dtype="float32", kv_cache_dtype="fp8") != digest(dtype="float32", kv_cache_dtype="float32")
    assert digest(dtype="float32", kv_cache_dtype="float32") == digest(dtype="float32")
    assert digest(dtype="float32", weight_dtype="float32") == digest(dtype="float32")
    quantised = [{}, {"weight_dtype": "int8"}, {"weight_dtype": "int4"}, {"activations": "int8"}]
    assert len({digest(dtype="float32", **fields) for fields in quantised}) == 4
    same = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "num_ranks": 4, "torch_version": "another"}
    assert digest(dtype="bfloat16", **same) == digest(dtype="bfloat16")
