"""A replica for prompts and one that generates behind a tritonserver: the tokens of one; and requests that clients
split themselves, by tensors.

pytest ci/L0_llm/test_contexts_apart.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from raw_stream import RawStream
from server_process import ServerProcess
from workload import alone, mixed_requests, together

from inflight_client import Client

CONTEXT = {"parameters": {"request_type": "context_only"}}
GENERATION = {"parameters": {"request_type": "generation_only"}}
PARAMS = "context_phase_params"
PROMPT = list(range(100, 150))


@pytest.fixture(scope="module")
def apart() -> Iterator[ServerProcess]:
    parameters = {"data_parallel_size": "2", "context_replicas": "1", "max_tokens_in_buffer": "8192"}
    with ServerProcess(parameters=parameters, apis=["tensorrtllm"]) as running:
        yield running


def test_clients_notice_nothing(client: Client, apart: ServerProcess) -> None:
    requests = mixed_requests(8, seed=4)
    expected = alone(client, requests)
    with Client(apart.grpc_url, timeout=120) as remote:
        assert together(remote, requests, 8) == [expected[asked] for asked in requests]


def test_clients_split_requests_by_tensors(apart: ServerProcess) -> None:
    asked: dict[str, Any] = {
        "input_ids": np.array(PROMPT, np.int32),
        "max_tokens": 20,
        "end_id": -1,
        "exclude_input_in_output": True,
        "temperature": 1.0,
        "seed": np.array([3], np.uint64),
    }
    with RawStream(apart.grpc_url) as stream:
        whole = stream.ask(asked)
        first = stream.ask(asked, **CONTEXT)
        assert (first.error, first.token_ids, first.finish_reason) == ("", whole.token_ids[:1], "length")
        params = first.responses[-1][PARAMS]
        second = stream.ask({**asked, PARAMS: params, "return_perf_metrics": True}, **GENERATION)
        assert second.error == "" and second.token_ids == whole.token_ids and PARAMS not in second.responses[-1]


def test_a_client_of_tensorrt_llm_splits_them_likewise(apart: ServerProcess) -> None:
    asked = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": np.array([[len(PROMPT)]], np.int32),
        "request_output_len": np.array([[20]], np.int32),
    }
    with RawStream(apart.grpc_url) as stream:
        whole = stream.ask(asked, model="tensorrt_llm").responses[-1]["output_ids"]
        first = stream.ask(asked, model="tensorrt_llm", **CONTEXT).responses[-1]
        assert first["output_ids"].reshape(-1).tolist() == whole.reshape(-1).tolist()[: len(PROMPT) + 1]
        params = first[PARAMS].reshape(1, -1)
        second = stream.ask({**asked, PARAMS: params}, model="tensorrt_llm", **GENERATION).responses[-1]
        assert second["output_ids"].tolist() == whole.tolist()
        refused = stream.ask(
            {"text_input": np.array([["a"]], np.object_), "max_tokens": np.array([[4]], np.int32)},
            model="ensemble",
            **CONTEXT,
        )
        assert "use llm or tensorrt_llm" in refused.error
