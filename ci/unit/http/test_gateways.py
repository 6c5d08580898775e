"""What gateways send, and what they read: LiteLLM, Portkey, Envoy AI Gateway, Kubernetes' inference gateway.

None of them runs here. The bodies and headers are those that their own pages and programs say they send, and the
metrics those that the model server protocol names for tritonserver with TensorRT-LLM.

pytest ci/unit/http/test_gateways.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import played_encoder
import pytest
from openai_server import CHATS, CLIENT, PlayedEngine, Running, checkpoint_folder, openai_server
from prometheus_client.parser import text_string_to_metric_families

from inflight.batch_manager_stats import BatchManagerStats

MESSAGES = [{"role": "user", "content": "hi"}]
LITELLM = {"authorization": "Bearer fake-api-key", "user-agent": "OpenAI/Python 2.0", "x-stainless-lang": "python"}
PORTKEY = {"authorization": "Bearer x", "user-agent": "portkey-gateway", "x-portkey-provider": "openai"}
ENVOY = {
    "x-ai-eg-model": "llm",
    "x-request-id": "4b9d2a35-4d1c-4d39-b7a6-000000000001",
    "x-forwarded-for": "10.0.0.1",
    "x-forwarded-proto": "https",
    "x-envoy-expected-rq-timeout-ms": "60000",
    "x-gateway-destination-endpoint": "10.0.0.2:9000",
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
CALLED += [{"role": "tool", "tool_call_id": "call_1", "content": "done"}]
TEXTS: list[tuple[str, dict[str, str], str, dict[str, Any]]] = [
    ("a chat", LITELLM, CHATS, {"messages": MESSAGES}),
    ("a look whether it lives", LITELLM, CHATS, {"messages": MESSAGES, "max_tokens": 1}),
    ("a stream", LITELLM, CHATS, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
    ("tools", LITELLM, CHATS, {"messages": CALLED, "tools": [TOOL], "tool_choice": "none"}),
    ("a text", LITELLM, "/v1/completions", {"prompt": "hi", "max_tokens": 5}),
    ("a response", LITELLM, "/v1/responses", {"input": "hi"}),
    ("a message", LITELLM, "/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("a chat", PORTKEY, CHATS, {"messages": MESSAGES, "max_tokens": 5, "stream": False, "user": "somebody"}),
    ("a chat", ENVOY, CHATS, {"messages": MESSAGES}),
    ("a stream", ENVOY, CHATS, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
    ("a message", ENVOY, "/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "stream": True}),
]
RERANK = {"query": "ab", "documents": ["c", "ab"], "top_n": 1}
VECTORS: list[tuple[str, dict[str, str], str, dict[str, Any]]] = [
    ("vectors", LITELLM, "/v1/embeddings", {"input": ["ab", "c"], "encoding_format": "float"}),
    ("vectors", ENVOY, "/v1/embeddings", {"input": "ab"}),
    ("vectors by Cohere's path", ENVOY, "/v2/embed", {"texts": ["ab"], "input_type": "search_query"}),
    (
        "a rerank",
        LITELLM,
        "/v1/rerank",
        {"query": "ab", "documents": ["c", "ab"], "top_n": 1, "return_documents": True},
    ),
    ("a rerank by Cohere's path", ENVOY, "/v2/rerank", {"query": "ab", "documents": ["c", "ab"], "top_n": 1}),
]


@pytest.mark.parametrize(("what", "headers", "path", "body"), TEXTS)
def test_what_a_gateway_asks_for_is_answered(
    running: Running, what: str, headers: dict[str, str], path: str, body: dict[str, Any]
) -> None:
    response = running.post(path, {"model": "llm", **body}, headers=headers)
    assert response.status_code == 200, response.text
    if "stream_options" in body:
        usage = [
            json.loads(line[6:]).get("usage") for line in response.text.split("\n\n") if line.startswith("data: {")
        ]
        assert usage[-1]["total_tokens"] > 0, "gateways count tokens by it"
    elif "stream" not in body and path == CHATS:
        assert response.json()["usage"]["total_tokens"] > 0


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    played = played_encoder.engine(pooled="vectors", num_labels=0, model_outputs=["hidden_states"])
    with openai_server(played, checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))) as url:
        yield Running(url, played)


@pytest.mark.parametrize(("what", "headers", "path", "body"), VECTORS)
def test_what_a_gateway_asks_of_an_encoder_is_answered(
    encoder: Running, what: str, headers: dict[str, str], path: str, body: dict[str, Any]
) -> None:
    response = encoder.post(path, {"model": "llm", **body}, headers=headers)
    assert response.status_code == 200, response.text
    if "rerank" in path:
        assert {"index", "relevance_score"} <= {*response.json()["results"][0]}, "which LiteLLM reads"


def test_models_are_found_by_name(running: Running) -> None:
    """Wildcard routes of LiteLLM and Envoy's model lists are made of them."""
    assert [each["id"] for each in running.get("/v1/models", headers=LITELLM).json()["data"]] == ["llm"]
    unknown = running.post(CHATS, {"model": "openai/llm", "messages": MESSAGES}, headers=LITELLM)
    assert unknown.status_code == 404, "the provider's part of a name is the gateway's, which takes it off"


OF_PROTOCOL = {
    "TotalQueuedRequests": ("nv_trt_llm_request_metrics", "request_type", "waiting"),
    "TotalRunningRequests": ("nv_trt_llm_request_metrics", "request_type", "scheduled"),
    "KVCacheUtilization": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"),
}
"""Of the model server protocol of the Gateway API Inference Extension: its metrics as tritonserver with TensorRT-LLM
has them, by name and label."""


def test_the_inference_gateway_finds_its_metrics(tmp_path: Path) -> None:
    """On the port of a server without tritonserver, from the first request on."""
    engine = PlayedEngine()
    numbers: dict[str, Any] = dict.fromkeys(BatchManagerStats.__struct_fields__, 0)
    numbers |= {"waiting_requests": 3, "scheduled_requests": 2, "fraction_used_kv_cache_blocks": 0.25}
    stats = BatchManagerStats(**{**numbers, "timestamp": "11-29-2026 04:00:00.000000"})
    engine.get_latest_batch_manager_stats = stats.to_json  # type: ignore[method-assign]
    with openai_server(engine, checkpoint_folder(tmp_path), launches_ranks=True) as url:
        text = CLIENT.get(f"{url}/metrics").text
    found = {
        (sample.name, name, value): sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "gauge"
        for sample in family.samples
        for name, value in sample.labels.items()
    }
    assert {metric: found[place] for metric, place in OF_PROTOCOL.items()} == {
        "TotalQueuedRequests": 3.0,
        "TotalRunningRequests": 2.0,
        "KVCacheUtilization": 0.25,
    }
