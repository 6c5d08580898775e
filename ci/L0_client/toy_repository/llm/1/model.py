"""A model with the tensors of `llm` and no network: the text it answers with is told by the prompt's first word.

    count    answers "0 1 2 …", one token a response, `max_tokens` of them
    merge    the same, three tokens a response
    slow     the same as count, one token every 20 ms, until cancelled
    stuck    one token, and nothing more until cancelled
    cancelled  how many requests with the prompt behind this word were cancelled
    refuse   UNAVAILABLE "Exceeds maximum queue size", with no code in the sentence, as tritonserver's own queue says it
    reject   INVALID_ARGUMENT before execute() returns, as the engine answers what it need not compute
    invalid  INVALID_ARGUMENT after one token
    broken   INTERNAL
    echo     answers with its own inputs as JSON

Every odd request carries the final flag on its last data response, every even one in an empty response after it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ERRORS = {
    "refuse": ("Exceeds maximum queue size", "UNAVAILABLE"),
    "reject": ("temperature must not be negative, got -1.0 [INVALID_ARGUMENT]", "INVALID_ARG"),
    "invalid": ("top_p must be in (0, 1], got 7.0 [INVALID_ARGUMENT]", "INVALID_ARG"),
    "broken": ("the forward pass failed [INTERNAL]", "INTERNAL"),
}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._numbers = itertools.count()
        self.num_cancelled: Counter[str] = Counter()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            answer = Answer(self, next(self._numbers), request.request_id(), inputs, request.get_response_sender())
            if answer.is_immediate:
                answer.run()
            else:
                threading.Thread(target=answer.run, daemon=True).start()


class Answer:
    def __init__(self, model, number, request_id, inputs, sender) -> None:
        self._model, self._number, self._request_id, self._inputs = model, number, request_id, inputs
        self._sender = sender
        text = inputs["text_input"].reshape(-1)[0].decode() if "text_input" in inputs else "count"
        self._text = text
        self._word, _, self._rest = text.partition(" ")
        self._max_tokens = int(inputs["max_tokens"].reshape(-1)[0])

    @property
    def is_immediate(self) -> bool:
        return self._word == "reject"

    def run(self) -> None:
        if self._word in ("refuse", "reject", "broken"):
            self._fail(*ERRORS[self._word])
        elif self._word == "echo":
            self._send(json.dumps(self._described()), [0], "stop", final=True)
        elif self._word == "cancelled":
            self._send(str(self._model.num_cancelled[self._rest]), [0], "stop", final=True)
        elif not self._inputs.get("stream", np.zeros(1)).any() and self._word != "slow":
            tokens = list(range(self._max_tokens))
            self._send("".join(f"{token} " for token in tokens), tokens, "length", final=True)
        else:
            self._stream(3 if self._word == "merge" else 1)

    def _stream(self, step: int) -> None:
        for first in range(0, self._max_tokens, step):
            if self._word == "slow" or (self._word == "stuck" and first):
                time.sleep(0.02)
                while self._word == "stuck" and not self._sender.is_cancelled():
                    time.sleep(0.02)
                if self._sender.is_cancelled():
                    self._model.num_cancelled[self._text] += 1
                    return self._fail("request was cancelled", "CANCELLED")
            if self._word == "invalid" and first:
                return self._fail(*ERRORS["invalid"])
            tokens = list(range(first, min(first + step, self._max_tokens)))
            last = tokens[-1] == self._max_tokens - 1
            text = "".join(f"{token} " for token in tokens)
            self._send(text, tokens, "length" if last else "", final=last and self._number % 2 == 1)
            if last and self._number % 2 == 0:
                self._sender.send(flags=FINAL)

    def _send(self, text: str, tokens: list[int], reason: str, *, final: bool) -> None:
        length = np.array([len(tokens)], np.int32)
        tensors = {
            "text_output": np.array([text.encode()], np.object_),
            "output_ids": np.array([tokens], np.int32),
            "sequence_length": length,
            "finish_reason": np.array([reason.encode()], np.object_),
            "output_log_probs": np.full((1, len(tokens)), -0.5, np.float32),
            "num_input_tokens": np.array([len(self._word)], np.int32),
            "num_output_tokens": length,
        }
        response = pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])
        self._sender.send(response, flags=FINAL if final else 0)

    def _fail(self, message: str, code: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._sender.send(pb_utils.InferenceResponse([], error), flags=FINAL)

    def _described(self) -> dict[str, object]:
        described = {"request_id": self._request_id}
        for name, value in self._inputs.items():
            items = value.reshape(-1).tolist()
            described[name] = [item.decode() if isinstance(item, bytes) else item for item in items]
        return described
