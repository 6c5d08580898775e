"""An engine that replays the messages of a leader: one batch, in which every stream gets one token a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from openai_server import PlayedEngine

from inflight.executor.wire.messages import Responses, decode_frames, encode
from inflight.result import FinishReason, Response, Result

SETTLE_SECONDS = 0.2
"""For what is on its way before the steps."""


class ReplayingEngine(PlayedEngine):
    """Waits for its streams; `run` then gives each of them a token a step."""

    def __init__(self, text: list[int], num_streams: int, num_tokens: int, step_seconds: float) -> None:
        """`text`: tokens that are repeated. `step_seconds`: between two steps; 0 = none."""
        super().__init__(lambda request: [], max_seq_len=4096, max_batch_size=num_streams)
        self._text, self._num_streams, self._num_tokens = text, num_streams, num_tokens
        self._step_seconds = step_seconds
        self.user_seconds = self.system_seconds = self.wall_seconds = 0.0

    def run(self, until_heard: Callable[[], object]) -> None:
        """`until_heard` returns once the clients have got all."""
        while len(self.enqueued) < self._num_streams:
            time.sleep(0.01)
        ids = list(self.enqueued)
        messages = [self._message(ids, step) for step in range(self._num_tokens)]
        time.sleep(SETTLE_SECONDS)
        before, began = os.times(), time.monotonic()
        for number, message in enumerate(messages):
            decoded = decode_frames([message])
            assert isinstance(decoded, Responses)
            self._deliver(decoded.responses)
            pause = began + (number + 1) * self._step_seconds - time.monotonic()
            if pause > 0:
                time.sleep(pause)
        until_heard()
        after = os.times()
        self.wall_seconds = time.monotonic() - began
        self.user_seconds, self.system_seconds = after.user - before.user, after.system - before.system

    def _message(self, ids: list[int], step: int) -> bytes:
        is_last = step == self._num_tokens - 1
        finish = FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED
        token = self._text[step % len(self._text)]
        return encode(
            Responses(
                [
                    Response(
                        request_id=id_,
                        result=Result(
                            output_token_ids=[token],
                            cum_log_prob=-0.5 * step,
                            finish_reason=finish,
                            is_final=is_last,
                            is_sequence_final=is_last,
                            decoding_iter=step + 1,
                        ),
                    )
                    for id_ in ids
                ]
            )
        )
