"""/metrics of a real server: every family of the tables is there, and requests move the numbers.

pytest ci/L0_backend/test_metrics.py
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from raw_stream import RawStream
from server_metrics import read_metrics, wait_until_settled
from server_process import ServerProcess

from inflight.batch_manager_stats import BatchManagerStats
from inflight.metric_families import ENGINE_INFO, FAMILIES, STATISTICS_FAMILIES

SERIES = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


def read(server: ServerProcess) -> dict[tuple[str, frozenset[str]], float]:
    """(name, labels) -> value."""
    found = SERIES.finditer(read_metrics(server))
    return {
        (m["name"], frozenset(m["labels"].split(","))): float(m["value"]) for m in found if 'model="llm"' in m["labels"]
    }


def wait_for(server: ServerProcess, holds: Callable[[dict], bool]) -> dict:
    """Metrics are updated once a period: poll until they have the value."""
    pause = threading.Event()
    for _ in range(3600):
        metrics = read(server)
        if holds(metrics):
            return metrics
        pause.wait(0.05)
    raise AssertionError("the metrics never came up to date")


def total(metrics: dict, name: str, *labels: str) -> float:
    return sum(value for (family, own), value in metrics.items() if family == name and set(labels) <= own)


def test_the_batch_managers_series_are_its_json_keys(server: ServerProcess, stream: RawStream) -> None:
    stream.ask({"text_input": "Once", "max_tokens": 100, "end_id": -1})
    metrics = wait_for(server, lambda found: total(found, "inflight_requests_total", 'outcome="completed"') > 0)
    series = [name for name, _ in metrics if name.startswith("nv_trt_llm_")]
    assert len(series) == len(BatchManagerStats.__struct_fields__)
    assert set(series) == {family.name for family in STATISTICS_FAMILIES}
    for family in FAMILIES:
        name = family.name + ("_count" if family.kind == "HISTOGRAM" else "")
        assert sum(name == found for found, _ in metrics) == len(family.series), name


def test_the_console_says_what_the_engine_is(server: ServerProcess, stream: RawStream) -> None:
    stream.ask({"text_input": "Once", "max_tokens": 1})
    metrics = wait_for(server, lambda found: total(found, "inflight_kv_blocks") > 0)
    (labels,) = (
        dict(re.findall(r'(\w+)="([^"]*)"', ",".join(own))) for name, own in metrics if name == ENGINE_INFO.name
    )
    (line,) = (line for line in server.told.splitlines() if line.startswith("inflight: engine "))
    assert line.startswith(
        f"inflight: engine llm: {labels['architecture']} on {labels['device']} ({labels['device_name']}), "
        f"{labels['layers']} layers; 1 rank; dtype {labels['dtype']}, weights {labels['weight_dtype']}, "
        f"KV cache {labels['kv_cache_dtype']} of "
    )
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    num_tokens = total(metrics, "inflight_kv_blocks") * total(metrics, blocks, 'kv_cache_block_type="tokens_per"')
    assert f" of {num_tokens:.0f} tokens; max_batch_size 64, max_seq_len 2048" in line


def test_requests_are_counted_and_timed(server: ServerProcess, stream: RawStream) -> None:
    before = wait_until_settled(server).values
    stream.ask({"text_input": "Once upon a time", "max_tokens": 20, "end_id": -1, "stream": True})
    assert stream.ask({"text_input": "Once", "max_tokens": 0}).error

    def done(metrics: dict) -> bool:
        return (
            total(metrics, "inflight_request_latency_seconds_count")
            > total(before, "inflight_request_latency_seconds_count")
            and total(metrics, "inflight_requests_total") >= total(before, "inflight_requests_total") + 2
        )

    after = wait_for(server, done)

    def change(name: str, *labels: str) -> float:
        return total(after, name, *labels) - total(before, name, *labels)

    assert change("inflight_requests_total", 'outcome="completed"') == 1
    assert change("inflight_requests_total", 'outcome="rejected"') == 1
    assert change("nv_llm_output_token_len_sum") == 20
    assert change("nv_llm_output_token_len_bucket", 'le="50"') == 1
    assert change("nv_llm_output_token_len_bucket", 'le="10"') == 0
    for name in ("time_to_first_token", "time_per_output_token", "request_queue_time", "request_latency"):
        assert change(f"inflight_{name}_seconds_count") == 1
        assert change(f"inflight_{name}_seconds_sum") > 0
    assert change("inflight_request_latency_seconds_sum") >= change("inflight_time_to_first_token_seconds_sum") > 0


def test_who_waits_for_a_place_is_shown(narrow_server: ServerProcess) -> None:
    """Of two clients, that ask again and again until it is seen, one is served and one waits."""
    name, seen = "inflight_requests_queued", threading.Event()

    def keep_asking() -> None:
        with RawStream(narrow_server.grpc_url) as stream:
            while not seen.is_set():
                stream.ask({"text_input": "Once", "max_tokens": 400, "end_id": -1, "stream": True})

    crowd = [threading.Thread(target=keep_asking) for _ in range(2)]
    for client in crowd:
        client.start()
    try:
        wait_for(narrow_server, lambda found: total(found, name) == 1)
    finally:
        seen.set()
        for client in crowd:
            client.join()
    wait_for(narrow_server, lambda found: total(found, name) == 0)


def test_an_idle_server_shows_no_active_request(server: ServerProcess, stream: RawStream) -> None:
    stream.ask({"text_input": "Once", "max_tokens": 100, "end_id": -1})
    name = "nv_trt_llm_request_metrics"

    def is_idle(found: dict) -> bool:
        return total(found, name, 'request_type="active"') == 0 < total(found, name, 'request_type="max"')

    metrics = wait_for(server, is_idle)
    assert 0 < total(metrics, "inflight_kv_blocks_free") <= total(metrics, "inflight_kv_blocks")
