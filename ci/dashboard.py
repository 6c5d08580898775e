"""Grafana's dashboard of a server, `backend/monitoring/grafana_dashboard.json`, made from a table of panels.

`python -m ci.dashboard` brings it up to date, `ci/unit/house/test_monitoring.py` fails where it is not, and
`ci/L0_monitoring` runs every expression against a Prometheus that scrapes a server under load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "backend" / "monitoring" / "grafana_dashboard.json"
WIDTH, HEIGHT = 8, 7
"""Of a panel, on Grafana's grid of 24 columns."""
INTERVAL = "$__rate_interval"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A time series panel."""

    title: str
    what: str
    """Shown when the mouse is over the title."""
    lines: Mapping[str, str]
    """Legend -> PromQL."""
    unit: str = "short"
    """In Grafana's words."""


def of_engine(family: str, label: str = "") -> str:
    """A gauge of the engine. Every front shows it, also one that ended: the engine's own model is asked, and the
    largest of its stubs' values taken. Several servers are added up."""
    selected = f'{family}{{job="$job", model="$engine"}}'
    inner = f"max by (instance, {label}) ({selected})" if label else f"max by (instance) ({selected})"
    return f"sum by ({label}) ({inner})" if label else f"sum({inner})"


def rate(family: str, by: str = "") -> str:
    """Growth per second, of all models of all servers together."""
    return f'sum{f" by ({by})" if by else ""} (rate({family}{{job="$job"}}[{INTERVAL}]))'


def share(family: str, chosen: str) -> str:
    """The part of a counter's growth that the series with the label `chosen` have, of which there may be none yet."""
    return f'(sum(rate({family}{{job="$job", {chosen}}}[{INTERVAL}])) or vector(0)) / {rate(family)}'


def quantiles(family: str, *, of: str = "") -> dict[str, str]:
    return {
        f"{of}p{round(100 * q)}": f"histogram_quantile({q}, {rate(family + '_bucket', 'le')})"
        for q in (0.5, 0.95, 0.99)
    }


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            title="Requests by state",
            what="Sequences that the engine holds: active ones, those in the latest step, those that compute their "
            "prompt, those that wait for a place or for memory.",
            lines={"{{request_type}}": of_engine("nv_trt_llm_request_metrics", "request_type")},
        ),
        Panel(
            title="Queue",
            what="Requests that wait on the leader until another one ends, and sequences that gave their memory back.",
            lines={
                "queued": of_engine("inflight_requests_queued"),
                "paused": 'sum(max by (instance) (nv_trt_llm_inflight_batcher_metrics{job="$job", model="$engine", '
                'inflight_batcher_specific_metric="paused_requests"}))',
            },
        ),
        Panel(
            title="Accepted and ended requests",
            what="Requests to tritonserver's models that came, and that ended, by outcome, each second.",
            lines={
                "accepted": rate("inflight_requests_accepted_total"),
                "{{outcome}}": rate("inflight_requests_total", "outcome"),
            },
            unit="reqps",
        ),
        Panel(
            title="Errors",
            what="The share of requests that the server failed or could not serve, and that it refused.",
            lines={
                "failed": share("inflight_requests_total", 'outcome=~"failed|unavailable"'),
                "refused": share("inflight_requests_total", 'outcome=~"rejected|queue_full"'),
                "OpenAI 5xx": share("inflight_openai_requests_total", 'status=~"5.."'),
            },
            unit="percentunit",
        ),
        Panel(
            title="Guided answers in an hour",
            what="Those that were held against their guides once more, and those that did not follow them.",
            lines={
                "checked": 'sum(increase(inflight_guided_answers_checked_total{job="$job"}[1h]))',
                "failed": 'sum(increase(inflight_guided_answers_failed_total{job="$job"}[1h]))',
            },
        ),
        Panel(
            title="Engine ready",
            what="1 while every rank of a replica is alive and answers.",
            lines={"{{instance}}": 'max by (instance) (inflight_engine_ready{job="$job", model="$engine"})'},
        ),
        Panel(
            title="Replicas and spares",
            what="1 while every rank of a replica is alive and answers; loaded sets of ranks that wait to take over.",
            lines={
                "replica {{replica}}": of_engine("inflight_replica_ready", "replica"),
                "spares": of_engine("inflight_engine_spares"),
            },
        ),
        Panel(
            title="Relaunches of ranks in an hour",
            what="How often ranks were lost, and for how many seconds they were being relaunched.",
            lines={
                "relaunches": 'sum(increase(inflight_engine_relaunches_total{job="$job", model="$engine"}[1h]))',
                "seconds": 'sum(increase(inflight_engine_relaunch_seconds_total{job="$job", model="$engine"}[1h]))',
            },
        ),
    ),
    "Speed": (
        Panel(
            title="Tokens per second",
            what="Tokens of requests that ended: a long output counts when it is complete.",
            lines={
                "generated": rate("nv_llm_output_token_len_sum"),
                "prompts": rate("nv_llm_input_token_len_sum"),
                "generated, OpenAI": rate("inflight_openai_generated_tokens_total"),
                "prompts, OpenAI": rate("inflight_openai_prompt_tokens_total"),
            },
        ),
        Panel(
            title="Time to first token",
            what="From a request's arrival at the ranks; of the OpenAI server, from its arrival to its first chunk.",
            lines=quantiles("inflight_time_to_first_token_seconds")
            | quantiles("inflight_openai_time_to_first_token_seconds", of="OpenAI "),
            unit="s",
        ),
        Panel(
            title="Inter-token latency",
            what="Mean time between a request's tokens after the first.",
            lines=quantiles("inflight_time_per_output_token_seconds")
            | quantiles("inflight_openai_time_per_output_token_seconds", of="OpenAI "),
            unit="s",
        ),
        Panel(
            title="Queue time",
            what="From a request's arrival at the ranks to its first step.",
            lines=quantiles("inflight_request_queue_time_seconds"),
            unit="s",
        ),
        Panel(
            title="Request latency",
            what="From a request's acceptance to its last response.",
            lines=quantiles("inflight_request_latency_seconds"),
            unit="s",
        ),
        Panel(
            title="Steps per second",
            what="Iterations of the engine, and the prompt tokens of the latest one.",
            lines={
                "steps": 'sum(rate(nv_trt_llm_general_metrics{job="$job", model="$engine", '
                f'general_type="iteration_counter"}}[{INTERVAL}]))',
                "prompt tokens": 'sum(max by (instance) (nv_trt_llm_inflight_batcher_metrics{job="$job", '
                'model="$engine", inflight_batcher_specific_metric="total_context_tokens"}))',
            },
        ),
    ),
    "Memory and drafts": (
        Panel(
            title="KV cache blocks by state",
            what="Blocks that sequences use, and free ones, of which many hold cached prefixes.",
            lines={
                "{{kv_cache_block_type}}": "sum by (kv_cache_block_type) (max by (instance, kv_cache_block_type) "
                '(nv_trt_llm_kv_cache_block_metrics{job="$job", model="$engine", kv_cache_block_type=~"used|free"}))'
            },
        ),
        Panel(
            title="Prefix cache hits",
            what="The share of prompts' full blocks that were found in the cache.",
            lines={
                "hits": share("inflight_prefix_cache_blocks_total", 'result="hit"'),
                "hits, OpenAI": share("inflight_openai_prefix_cache_blocks_total", 'result="hit"'),
            },
            unit="percentunit",
        ),
        Panel(
            title="Accepted drafts",
            what="The share of verified draft tokens that the output has.",
            lines={
                "accepted": share("inflight_draft_tokens_total", 'result="accepted"'),
                "accepted, OpenAI": share("inflight_openai_draft_tokens_total", 'result="accepted"'),
            },
            unit="percentunit",
        ),
        Panel(
            title="Drafts per second",
            what="Draft tokens that were verified.",
            lines={
                "drafts": rate("inflight_draft_tokens_total"),
                "drafts, OpenAI": rate("inflight_openai_draft_tokens_total"),
            },
        ),
        Panel(
            title="Memory of the ranks",
            what="Bytes on the host, pinned ones, and on GPUs.",
            lines={"{{memory_type}}": of_engine("nv_trt_llm_runtime_memory_metrics", "memory_type")},
            unit="bytes",
        ),
    ),
    "OpenAI server": (
        Panel(
            title="Requests by path and status",
            what="HTTP requests that were answered, each second; 499: the client did not wait.",
            lines={"{{path}} {{status}}": rate("inflight_openai_requests_total", "path, status")},
            unit="reqps",
        ),
        Panel(
            title="Duration by path",
            what="From a request's arrival to the end of its answer: 95 % were shorter.",
            lines={
                "{{path}}": "histogram_quantile(0.95, "
                f"{rate('inflight_openai_request_duration_seconds_bucket', 'path, le')})"
            },
            unit="s",
        ),
        Panel(
            title="Open requests",
            what="HTTP requests without a complete answer.",
            lines={"open": 'sum(inflight_openai_requests_in_progress{job="$job"})'},
        ),
    ),
}


def expressions() -> Iterator[tuple[str, str]]:
    """(title of its panel, PromQL) of every line."""
    for panels in ROWS.values():
        for panel in panels:
            for expression in panel.lines.values():
                yield panel.title, expression


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": _place(top, 0, 24, 1)})
        top += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, 24 // WIDTH)
            place = _place(top + line * HEIGHT, column * WIDTH, WIDTH, HEIGHT)
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": place})
        top += -(-len(row) // (24 // WIDTH)) * HEIGHT
    return {
        "uid": "inflight",
        "title": "inflight",
        "tags": ["inflight", "triton", "llm"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                _variable("job", "Job", "label_values(inflight_engine_ready, job)"),
                _variable("engine", "Engine", 'label_values(inflight_engine_ready{job="$job"}, model)', "llm"),
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


def _variable(name: str, label: str, query: str, value: str = "") -> dict[str, Any]:
    chosen = {"current": {"text": value, "value": value}} if value else {}
    return {"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, **chosen}


def _place(y: int, x: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
