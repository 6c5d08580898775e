"""A model that is loaded with another configuration while it serves: every request has its one answer, from one load or
the other, and nothing of the earlier loads is left.

pytest ci/L0_backend/test_reload_in_place.py [--reloads 50]
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from raw_stream import Answer, RawStream
from server_process import ServerProcess
from waiting import until

STREAMS = 8


def request_of(number: int) -> dict[str, Any]:
    """Some are answered at once, some outlive a reload."""
    return {"input_ids": [5 + number, 6, 7], "max_tokens": 20 + 200 * number, "end_id": -1, "stream": True}


def keep_asking(url: str, number: int, done: threading.Event) -> list[Answer]:
    """One request after the other. Every other client has a stream for all of them, the rest one for each."""
    answers: list[Answer] = []
    stream = RawStream(url)
    try:
        while not done.is_set():
            answers.append(stream.ask(request_of(number)))
            if number % 2:
                stream.close()
                stream = RawStream(url)
        # Requests of one stream are answered in order: a second final response to the one before would come first.
        answers.append(stream.ask(request_of(0)))
    finally:
        stream.close()
    return answers


def load_again(server: ServerProcess, parameters: dict[str, str]) -> int:
    """Load `llm` in place; the pid of the stub that has come."""
    before = server.stub_pids
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        config = client.get_model_config("llm", as_json=True)["config"]
        config["parameters"].update({key: {"string_value": value} for key, value in parameters.items()})
        client.load_model("llm", config=json.dumps(config))
    (new,) = server.stub_pids.keys() - before.keys()
    return new


def what_there_is(server: ServerProcess) -> tuple[int, int, int]:
    """Processes, folders of an engine, shared memory of a stub."""
    folder = server.ready_endpoints.run_directory
    return len(server.pids), len(list(folder.glob("engine-*"))), len(server.shared_memory)


def test_every_request_has_one_answer_while_the_model_is_reloaded(
    fake_engine: Path, pytestconfig: pytest.Config
) -> None:
    # What is freed is overwritten at once, so that a use of it is found in the first reload and not in the fifth.
    with ServerProcess(model_repository=fake_engine, environment={"MALLOC_PERTURB_": "165"}, open_apis=True) as server:
        pid, at_first = server.tritonserver_pid, what_there_is(server)
        with RawStream(server.grpc_url) as stream:
            alone = [stream.ask(request_of(number)).token_ids for number in range(STREAMS)]
        done = threading.Event()
        with ThreadPoolExecutor(STREAMS) as threads:
            asking = [threads.submit(keep_asking, server.grpc_url, number, done) for number in range(STREAMS)]
            try:
                for number in range(pytestconfig.getoption("--reloads")):
                    load_again(server, {"log_level": ("WARNING", "INFO")[number % 2]})
            finally:
                done.set()
            answers = [each.result() for each in asking]
        for number, (*own, last) in enumerate(answers):
            assert own and [answer.error for answer in own if answer.error] == []
            assert all(answer.num_finals == 1 and answer.token_ids == alone[number] for answer in own)
            assert last.num_finals == 1 and last.token_ids == alone[0]
        until(lambda: what_there_is(server) == at_first, "one stub and its rank are left")
        assert server.tritonserver_pid == pid and "again" not in server.told


def test_an_engine_is_scaled_up_and_down_under_its_streams() -> None:
    """With the weights and ranks of a real engine: those of before end when their last stream has."""
    prompt = {"text_input": "Once upon a time", "max_tokens": 600, "end_id": -1, "stream": True, "temperature": 1.0}
    asked = {**prompt, "seed": 7}
    parameters = {"max_tokens_in_paged_kv_cache": "4096", "data_parallel_size": "1"}
    with ServerProcess(parameters=parameters, open_apis=True) as server:
        with RawStream(server.grpc_url) as stream:
            alone = stream.ask(asked).token_ids
        for num_replicas in (2, 1):
            before = server.ranks
            with RawStream(server.grpc_url) as stream, RawStream(server.grpc_url) as other:
                begun = other.send(asked)
                other.take()
                load_again(server, {"data_parallel_size": str(num_replicas)})
                after = [stream.send(asked) for _ in range(num_replicas)]
                stream.collect(*after)
                other.collect(begun)
            assert [answer.error for answer in (begun, *after)] == [""] * (1 + num_replicas)
            assert all(answer.token_ids == alone for answer in (begun, *after))
            # tritonserver keeps what a stream has used until the stream is closed.
            until(partial(are_replaced, server, before, num_replicas), "others serve, and those of before have ended")


def are_replaced(server: ServerProcess, before: list[int], number: int) -> bool:
    """Whether there are so many ranks now, and none of `before`."""
    return len(server.ranks) == number and not set(before) & set(server.ranks)
