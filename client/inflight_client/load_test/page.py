"""A report as one self-contained HTML page: with the plot inline, without scripts or external resources."""

from __future__ import annotations

import html
from pathlib import Path

from inflight_client.load_test import plot
from inflight_client.load_test.report import COLUMNS, load_sentence, remarks, row, sweeps, to_json
from inflight_client.load_test.results import LevelResult
from inflight_client.load_test.runner import LoadTestReport
from inflight_client.load_test.server_facts import ServerFacts

_STYLE = """
  :root { color-scheme: light dark; --ink: #1f2933; --muted: #616e7c; --line: #e4e7eb; --paper: #fff; --back: #f5f7fa;
    --tokens: #2563a6; --requests: #b45f06; --p50: #7fb3dd; --p90: #3b7fbf; --p99: #123d6b; }
  @media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --muted: #9aa5b1; --line: #323f4b; --paper: #1b232c;
    --back: #12181f; --tokens: #7fb3dd; --requests: #f0a04b; --p50: #47739b; --p90: #7fb3dd; --p99: #d7eafa; } }
  * { box-sizing: border-box; }
  body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
  main { max-width: 1320px; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
  h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
  h2 { font-size: 1.05rem; margin: 0 0 .8rem; }
  h3 { font-size: .9rem; margin: 0 0 .3rem; }
  .sub { color: var(--muted); margin: .4rem 0 1.4rem; overflow-wrap: anywhere; }
  .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; }
  .card, section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
  .card { padding: .8rem 1rem; }
  .card b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
  .card span { color: var(--muted); font-size: .85rem; }
  section { margin-top: 1rem; padding: 1rem; }
  .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); gap: 1rem; }
  svg { width: 100%; height: auto; display: block; }
  svg text { font-family: inherit !important; }
  dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: .2rem 2rem;
    margin: 0; }
  dl div { display: grid; grid-template-columns: 8.5rem 1fr; gap: .6rem; }
  dt { color: var(--muted); }
  dd { margin: 0; overflow-wrap: anywhere; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { padding: .45rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
  th { color: var(--muted); font-weight: 600; font-size: .8rem; vertical-align: bottom; }
  td { white-space: nowrap; }
  th:first-child, td:first-child { text-align: left; }
  tr:last-child td { border-bottom: 0; }
  .note { color: var(--muted); font-size: .85rem; margin: .6rem 0 0; }
  .remark { color: var(--ink); }
  @media (max-width: 800px) {
    main { padding: 1.2rem .8rem 2rem; }
    thead { display: none; }
    table, tbody, tr, td { display: block; }
    tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
    tr:last-child { border-bottom: 0; }
    td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0; }
    td::before { content: attr(data-label); color: var(--muted); text-align: left; white-space: normal; }
    td:first-child { font-weight: 600; }
    td:first-child::before { content: none; }
  }
"""

_NOTES = (
    "Every prompt is sent once, so no cache answers for the model. Throughput is over the time from the first request "
    "sent to the last response.",
    "Time to first token is until the first response. A response may carry several tokens: inter-token latency spreads "
    "the gap before it evenly over them, or the time behind the first response over all of an answer's tokens, if the "
    "server only tells their sum.",
)


def write_page(report: LoadTestReport, path: Path) -> None:
    path.write_text(page(report), encoding="utf-8")


def page(report: LoadTestReport) -> str:
    facts = to_json(report)
    machine = f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores"
    started = report.started.strftime("%Y-%m-%d %H:%M UTC")
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "\n".join(_row(result) for result in report.levels)
    plots = "\n".join(_plots(results) for results in sweeps(report.levels))
    told = "".join(f'<p class="note remark">{html.escape(remark)}</p>' for remark in remarks(report))
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in _NOTES)
    name = html.escape(report.options.model)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Load test of {name}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Load test of {name}</h1>
<p class="sub">{html.escape(load_sentence(report))} · {html.escape(report.options.url)} · {started}<br>
load from {html.escape(machine)}</p>
<div class="cards">{_cards(report)}</div>
<section><h2>Server</h2><dl>{_server(report.server)}</dl></section>
{plots}
<section><h2>Figures</h2><table><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table>{told}{notes}</section>
</main>
</body>
</html>
"""


def _cards(report: LoadTestReport) -> str:
    best = max(report.levels, key=lambda result: result.output_tokens_per_s)
    lightest = min(report.levels, key=lambda result: result.time_to_first_token.p50)
    num_answered = sum(result.num_requests for result in report.levels)
    num_failed = sum(result.num_errors for result in report.levels)
    cards = (
        (f"{best.output_tokens_per_s:,.0f}", f"output tokens/s at {best.name}, the most"),
        (f"{best.requests_per_s:.1f}", f"requests/s at {best.name}"),
        (
            f"{lightest.time_to_first_token.p50:.1f} ms",
            f"time to first token, p50, at {lightest.name}",
        ),
        (f"{num_answered:,}", f"requests, {num_failed or 'none'} failed"),
    )
    return "".join(f'<div class="card"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in cards)


def _server(server: ServerFacts) -> str:
    facts = {name.replace("_", " "): value for name, value in server.engine.items() if value}
    if not facts:
        facts["engine"] = f"unknown: {server.unknown}"
    if server.tritonserver:
        facts["tritonserver"] = server.tritonserver
    pairs = ((html.escape(name), html.escape(value)) for name, value in facts.items())
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)


def _plots(results: list[LevelResult]) -> str:
    drawn = "".join(f"<div><h3>{name}</h3>{svg}</div>" for name, svg in plot.panels(results))
    return f'<section><h2>Over {html.escape(results[0].mode.label)}</h2><div class="plots">{drawn}</div></section>'


def _row(result: LevelResult) -> str:
    cells = zip(COLUMNS, row(result), strict=True)
    return "<tr>" + "".join(f'<td data-label="{label}">{html.escape(cell)}</td>' for label, cell in cells) + "</tr>"
