"""A decoupled model that echoes its text once a token, every 20 ms, and does on demand what a backend should not.

lose     gives itself up as if its ranks had died
exit     ends its process at once
shout    prints more than a pipe holds
child    starts a process in a session of its own, as a launcher of ranks does; answers with its pid
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PERIOD = 0.02
SHOUTS = 100


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._name = args["model_name"]
        # Metric objects are not safe from two threads, so one lock guards the gauge and its count.
        self._lock, self._active = threading.Lock(), 0
        self._family = pb_utils.MetricFamily(
            name="nv_trt_llm_request_metrics", description="Requests by state", kind=pb_utils.MetricFamily.GAUGE
        )
        self._gauge = self._family.Metric(labels={"model": self._name, "request_type": "active"})

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            text, max_tokens = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0] for name in ("text_input", "max_tokens")
            )
            sender = request.get_response_sender()
            threading.Thread(target=self._answer, args=(text.decode(), int(max_tokens), sender), daemon=True).start()

    def _count(self, change: int) -> None:
        with self._lock:
            self._active += change
            self._gauge.set(self._active)

    def _answer(self, text: str, max_tokens: int, sender: pb_utils.InferenceResponseSender) -> None:
        self._count(1)
        if text == "exit":
            os._exit(3)
        if text == "shout":
            for _ in range(SHOUTS):
                print("shouted" * 1000, flush=True)
        if text == "child":
            text, max_tokens = str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid), 1
        for _ in range(max_tokens):
            time.sleep(PERIOD)
            tensor = pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=FINAL)
        self._count(-1)
        if text == "lose":
            Path(os.environ["INFLIGHT_RUN_DIR"], "unloaded", self._name).write_text("rank 1 was killed")
            pb_utils.unload_model(self._name)
