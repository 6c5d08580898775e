"""tritonserver and its stub are killed while streams of every kind are open: each goes on in the next server, and its
client has what it gets undisturbed. To the last bit of every number, where C++ computes.

pytest ci/L0_llm/test_resume.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import request_kinds
from raw_stream import as_array
from request_kinds import ENGINE, KINDS, RequestKind
from server_process import ROOT, ServerProcess
from waiting import until

from inflight.run_directory import OPEN_REQUESTS
from inflight.supervisor import processes
from inflight_client import Call, Client, ClientError, ConnectionLost, GrpcTransport
from inflight_client._protocol import new_request_id
from inflight_client._resume import ResumingReplyStream
from inflight_kernels.cpu import unsupported_reason

pytestmark = pytest.mark.long

PATIENCE = 240.0
"""Seconds for a server to come back."""
TRIES = 5
"""Until deaths have met streams."""
IS_EXACT = not unsupported_reason()
STOPPING = {"stop_words": ["very big", "dog's n"], "max_tokens": 40}
SAMPLED = {"temperature": 1.0, "seed": np.array([3], np.uint64)}
MORE_KINDS = (
    RequestKind(feature="stop string", tensors=STOPPING),
    RequestKind(
        feature="several sequences with stop strings",
        tensors={"stop_words": ["a", "!"], "num_return_sequences": 3, "max_tokens": 40, **SAMPLED},
    ),
    RequestKind(feature="long", tensors={"max_tokens": 120, "return_log_probs": True, **SAMPLED}),
)
ALL = (*KINDS, *MORE_KINDS)
OF_TOKENS = ("output_ids", "output_log_probs", "top_token_ids", "top_log_probs", "generation_logits", "hidden_states")
"""Outputs whose second dimension is the response's tokens."""
OF_PROMPT = (
    "prompt_log_probs",
    "prompt_top_token_ids",
    "prompt_top_log_probs",
    "context_logits",
    "context_hidden_states",
)


@pytest.fixture(scope="module")
def mortal() -> Iterator[ServerProcess]:
    """The last test ends it."""
    exact = {"dtype": "bfloat16", "cpu_compile": "true"} if IS_EXACT else {"dtype": "float32", "cpu_compile": "false"}
    patience = {"worker_heartbeat_timeout_ms": "600000"}  # a test holds the rank
    parameters = {"num_threads": "1", **patience, **exact, **{key: str(value) for key, value in ENGINE.items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(request_kinds.__file__).parent))
        with ServerProcess(parameters=parameters) as running:
            yield running


@dataclass
class Stream:
    """The replies of one request, read on a thread of its own."""

    kind: RequestKind
    replies: ResumingReplyStream
    heard: Callable[[Stream], None]
    outputs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        try:
            for reply in self.replies:
                if reply.outputs:
                    self.outputs.append(dict(reply.outputs))
                    self.heard(self)
        except ClientError as error:
            self.error = str(error)

    def answer(self) -> list[dict[str, Any]]:
        """For each sequence its outputs, joined."""
        found = []
        for index in range(self.kind.num_sequences):
            own = [each for each in self.outputs if int(each.get("sequence_index", [0])[0]) == index]
            own = own[-1:] if "beam_width" in self.kind.tensors else own
            joined: dict[str, Any] = {
                "text": b"".join(each["text_output"][0] for each in own),
                "finish_reason": [each["finish_reason"][0] for each in own if each["finish_reason"][0]],
            }
            for axis, names in ((1, OF_TOKENS), (0, OF_PROMPT)):
                for name in names:
                    arrays = [each[name] for each in own if name in each]
                    if arrays:
                        joined[name] = np.concatenate(arrays, axis=axis)
            if "cum_log_probs" in own[-1]:
                joined["cum_log_probs"] = own[-1]["cum_log_probs"]
            found.append(joined)
        return found


def serve(
    server: ServerProcess, kinds: Iterable[RequestKind], heard: Callable[[Stream], None] = lambda stream: None
) -> list[Stream]:
    """All at once. `heard` is called at each reply."""
    transport = GrpcTransport(server.grpc_url)
    streams = []
    for kind in kinds:
        inputs = {name: as_array(name, value) for name, value in {**kind.inputs(), "stream": True}.items()}
        call = Call(model="llm", inputs=inputs, request_id=new_request_id())
        streams.append(Stream(kind, ResumingReplyStream(transport, call, PATIENCE), heard))
    for stream in streams:
        stream.thread.start()
    return streams


def check(streams: list[Stream], wanted: dict[str, list[dict[str, Any]]]) -> None:
    close: dict[str, float] = {"rtol": 0, "atol": 0 if IS_EXACT else 2e-3}
    for stream in streams:
        stream.thread.join()
    assert {stream.kind.feature: stream.error for stream in streams if stream.error} == {}
    for stream in streams:
        feature = stream.kind.feature
        for found, expected in zip(stream.answer(), wanted[feature], strict=True):
            assert found.keys() == expected.keys(), feature
            for name, value in expected.items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_allclose(found[name], value, **close, err_msg=f"{feature}: {name}")
                else:
                    assert found[name] == value, (feature, name)


@pytest.fixture(scope="module")
def undisturbed(mortal: ServerProcess) -> dict[str, list[dict[str, Any]]]:
    streams = serve(mortal, ALL)
    for stream in streams:
        stream.thread.join()
    assert {stream.kind.feature: stream.error for stream in streams if stream.error} == {}
    return {stream.kind.feature: stream.answer() for stream in streams}


def kill_tritonserver(server: ServerProcess) -> None:
    os.kill(server.tritonserver_pid, signal.SIGKILL)


def kill_stub(server: ServerProcess) -> None:
    (stub,) = server.stub_pids
    os.kill(stub, signal.SIGKILL)


def num_open(server: ServerProcess) -> int:
    """Requests that its stub has taken and not answered, as it tells the supervisor."""
    (stub,) = server.stub_pids
    (file,) = (server.ready_endpoints.run_directory / OPEN_REQUESTS).glob(f"*.{stub}")
    return int.from_bytes(file.read_bytes(), sys.byteorder)


def test_streams_of_all_kinds_go_on_when_their_server_dies_twice(
    mortal: ServerProcess, undisturbed: dict[str, list[dict[str, Any]]]
) -> None:
    """tritonserver once a third of the streams can have a reply, and the next one's stub after as many replies again.
    So early because busy servers join replies: some streams have but one."""
    assert any(deaths_meet_streams(mortal, undisturbed) for _ in range(TRIES)), "no two deaths have met streams"


def deaths_meet_streams(mortal: ServerProcess, undisturbed: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether some stream went on after each of two deaths. On a busy machine a reply may be read so late that the
    server, when it dies, has sent all others, too."""
    lock, num_heard, enough = threading.Lock(), Counter[int](), len(ALL) // 3

    def heard(stream: Stream) -> None:
        # What the first server said before its end may be read after it.
        serving = min(stream.replies.num_resumes, 1)
        with lock:
            num_heard[serving] += 1
            if serving == 0 and num_heard[serving] == enough:
                kill_tritonserver(mortal)
            elif serving == 1 and num_heard[serving] == enough:
                kill_stub(mortal)

    with Client(mortal.grpc_url) as client:
        client.wait_until_ready(PATIENCE)
    streams = serve(mortal, ALL, heard)
    check(streams, undisturbed)
    return num_heard[1] >= enough and max(stream.replies.num_resumes for stream in streams) == 2


def test_streams_go_on_whose_server_dies_before_their_first_token(
    mortal: ServerProcess, undisturbed: dict[str, list[dict[str, Any]]]
) -> None:
    with Client(mortal.grpc_url) as client:
        client.wait_until_ready(PATIENCE)
    with mortal.hold_ranks():
        streams = serve(mortal, ALL[:8])
        until(lambda: num_open(mortal) == len(streams), "the server has them all")
        before = mortal.tritonserver_pid
        kill_tritonserver(mortal)
        until(lambda: not processes.is_alive(before), "it has ended")
    check(streams, undisturbed)
    assert {stream.replies.num_resumes for stream in streams} == {1}


def test_the_command_line_goes_on(mortal: ServerProcess) -> None:
    arguments = ["generate", "Once upon a time", "-n", "200", "-t", "0", "--url", mortal.grpc_url]
    command = [sys.executable, "-m", "inflight_client.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "client")}
    with Client(mortal.grpc_url) as client:
        client.wait_until_ready(PATIENCE)
    whole = subprocess.run(command, capture_output=True, env=environment, timeout=PATIENCE, check=True).stdout
    with subprocess.Popen([*command, "--resume"], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        begun = os.read(process.stdout.fileno(), 100)
        kill_tritonserver(mortal)
        rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert begun + rest == whole and len(begun) < len(whole)


def test_a_server_that_is_started_anew_takes_streams_up_and_one_that_is_not_ends_them(
    mortal: ServerProcess, undisturbed: dict[str, list[dict[str, Any]]]
) -> None:
    """The supervisor is killed as well. The next one's server has the same port."""
    with Client(mortal.grpc_url, resume=True, resume_timeout=1.0) as client:
        client.wait_until_ready(PATIENCE)
        heard = threading.Event()
        streams = serve(mortal, ALL[-3:], lambda stream: heard.set())
        with client.stream("Once upon a time", max_tokens=2000, end_id=-1, temperature=0.0) as impatient:
            begun = next(impatient).text
            assert heard.wait(PATIENCE)
            mortal.stop(signal.SIGKILL)
            with pytest.raises(ConnectionLost, match="the server ended, and was not back within 1 s"):
                list(impatient)
    assert impatient.completion.text.startswith(begun)
    until(lambda: not mortal.pids, "nothing of the killed one holds its ports any more")
    with ServerProcess(**{**mortal.options, "log_file": None}):
        check(streams, undisturbed)
