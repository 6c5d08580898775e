"""Dashboard, alert rules and metrics against Prometheus itself, which scrapes a real server under load."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from prometheus import CLIENT, MONITORING, Prometheus, promtool, scraping
from raw_stream import RawStream
from server_metrics import read_metrics
from server_process import ServerProcess
from waiting import until

from ci.dashboard import INTERVAL, expressions

COLON = "metric names should not contain ':'"
SUFFIX = 'counter metrics should have "_total" suffix'
UNIT = "metric names should not contain abbreviated units"
COUNT = 'non-histogram and non-summary metrics should not have "_count" suffix'
AS_OTHERS_HAVE_THEM = {
    "nv_inference_compute_infer_duration_us": (SUFFIX, UNIT),
    "nv_inference_compute_input_duration_us": (SUFFIX, UNIT),
    "nv_inference_compute_output_duration_us": (SUFFIX, UNIT),
    "nv_inference_queue_duration_us": (SUFFIX, UNIT),
    "nv_inference_request_duration_us": (SUFFIX, UNIT),
    "nv_inference_count": (SUFFIX, COUNT),
    "nv_inference_exec_count": (SUFFIX, COUNT),
    "nv_inference_pending_request_count": (COUNT,),
    "nv_inference_request_failure": (SUFFIX,),
    "nv_inference_request_success": (SUFFIX,),
    "vllm:e2e_request_latency_seconds": (COLON,),
    "vllm:generation_tokens_total": (COLON,),
    "vllm:prompt_tokens_total": (COLON,),
    "vllm:request_generation_tokens": (COLON,),
    "vllm:request_params_n": (COLON,),
    "vllm:request_prompt_tokens": (COLON,),
    "vllm:time_per_output_token_seconds": (COLON,),
    "vllm:time_to_first_token_seconds": (COLON,),
}
"""Names that break promtool's rules: tritonserver's own, and vLLM's, whose dashboards ask for them as they are."""
FORCED = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": " a time there was a small dog"}
GUIDED = {"guided_regex": FORCED["guided_decoding_guide"]}
"""Tokens that a grammar forces are drafts, which are accepted for certain."""
PROMPT = "Once upon a time there was a dog. Once upon a time there was a dog. Once upon a time"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    parameters = {"num_threads": "1", "max_draft_len": "4"}
    with ServerProcess(apis=["vllm"], openai={"port": 0}, parameters=parameters) as running:
        yield running


@pytest.fixture(scope="module")
def load(server: ServerProcess) -> Iterator[None]:
    """Requests of every kind, one after the other, for as long as the tests last."""
    stopping = threading.Event()

    def ask() -> None:
        with (
            RawStream(server.grpc_url) as stream,
            openai.OpenAI(base_url=f"{server.openai_url}/v1", api_key="none", max_retries=0) as client,
        ):
            while not stopping.wait(0.05):
                stream.ask({"text_input": PROMPT, "max_tokens": 24, "end_id": -1, "stream": True})
                stream.ask({"text_input": "Once", "max_tokens": 0})
                stream.ask({"text_input": "Once upon", "max_tokens": 24, **FORCED})
                for piece in client.completions.create(
                    model="llm", prompt=PROMPT, max_tokens=16, stream=True, extra_body=GUIDED
                ):
                    assert piece.choices
                with pytest.raises(openai.NotFoundError):
                    client.completions.create(model="nobody", prompt="Once")

    thread = threading.Thread(target=ask, name="load")
    thread.start()
    yield
    stopping.set()
    thread.join(300)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, load: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(server, tmp_path_factory.mktemp("prometheus")) as running:
        yield running


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_every_line_of_the_dashboard_shows_something(prometheus: Prometheus, title: str, expression: str) -> None:
    asked = expression.replace(INTERVAL, "30s").replace("$job", "inflight").replace("$engine", "llm")
    assert "$" not in asked

    def has_values() -> bool:
        values = prometheus.query(asked)
        return bool(values) and not any(map(math.isnan, values))

    until(has_values, f"{title}: {asked}")


def test_the_dashboard_shows_what_happens(prometheus: Prometheus) -> None:
    lines = [
        expression.replace(INTERVAL, "30s").replace("$job", "inflight").replace("$engine", "llm")
        for title, expression in expressions()
        if title in ("Engine ready", "Prefix cache hits", "Accepted drafts", "Tokens per second")
    ]
    until(lambda: all(value > 0 for line in lines for value in prometheus.query(line)), f"{lines} are above 0")


def test_every_rule_is_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    until(lambda: all(rule["health"] == "ok" for rule in prometheus.alert_rules()), "every rule was evaluated")
    until(lambda: prometheus.query('up{job="inflight"}') == [1, 1], "both are scraped")
    assert [rule["name"] for rule in prometheus.alert_rules() if rule["state"] == "firing"] == []


def test_the_rules_fire_when_they_should() -> None:
    checked = promtool("check", "rules", str(MONITORING / "alerts.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_configuration_is_prometheus_own() -> None:
    checked = promtool("check", "config", str(MONITORING / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_finds_nothing_wrong_with_our_families(server: ServerProcess, load: None) -> None:
    def pages() -> tuple[str, str]:
        return read_metrics(server), CLIENT.get(f"{server.openai_url}/metrics").text

    def are_whole() -> bool:
        text = "".join(pages())
        return all(name in text for name in AS_OTHERS_HAVE_THEM)

    until(are_whole, "there are metrics of all models")
    found: dict[str, set[str]] = {}
    for text in pages():
        assert "# HELP inflight_" in text
        for line in promtool("check", "metrics", text=text).stderr.splitlines():
            name, _, rule = line.partition(" ")
            if not name.startswith("nv_gpu_"):  # tritonserver's own, where there is a GPU
                found.setdefault(name, set()).add(rule)
    assert found == {name: set(rules) for name, rules in AS_OTHERS_HAVE_THEM.items()}
