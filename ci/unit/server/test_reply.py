"""Responses that are too large for tritonserver's shared memory end in an error instead of nothing.

Run: pytest ci/unit/server/test_reply.py
"""

from __future__ import annotations

import os
from pathlib import Path

import fake_pb_utils as pb
import numpy as np
import pytest

from inflight.open_requests import OpenRequests, take_left
from inflight.run_directory import RUN_DIRECTORY
from inflight.server.reply import LARGE, Reply


class NoRoom(pb.ResponseSender):
    """Like tritonserver's where /dev/shm is full: a final response that cannot be made closes it all the same."""

    def send(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        if response is not None and response.error() is None:
            self.num_finals += bool(flags)
            raise RuntimeError("no room in shared memory")
        super().send(response, flags)


def test_a_large_final_response_that_cannot_be_sent_can_still_be_answered_by_an_error() -> None:
    sender = NoRoom()
    reply = Reply(pb, sender)
    with pytest.raises(RuntimeError):
        reply.send({"context_logits": np.zeros(LARGE, np.uint8)}, final=True)
    reply.fail("INTERNAL", "the response could not be made")
    assert sender.num_finals == 1 and not sender.misuse
    assert sender.error is not None and sender.error.message() == "the response could not be made [INTERNAL]"


@pytest.mark.parametrize(("size", "num_responses"), [(LARGE - 1, 1), (LARGE, 1)])
def test_a_final_response_ends_the_request_once_whatever_its_size(size: int, num_responses: int) -> None:
    sender = pb.ResponseSender()
    Reply(pb, sender).send({"context_logits": np.zeros(size, np.uint8)}, final=True)
    assert (len(sender.responses), sender.num_finals) == (num_responses, 1)
    assert sender.finished.is_set() and not sender.misuse


def test_an_error_of_one_prompt_leaves_the_request_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    reply = Reply(pb, pb.ResponseSender(), open_requests=OpenRequests("llm_0_0"))
    reply.fail("INVALID_ARGUMENT", "prompt 0: wrong", final=False)
    reply.fail("INVALID_ARGUMENT", "prompt 1: wrong", final=False)
    left = take_left(tmp_path, os.getpid())
    assert left is not None and left.num_open == 1
