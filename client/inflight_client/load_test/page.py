"""A report as one self-contained HTML page: with the plot inline, without scripts or external resources."""

from __future__ import annotations

import html
from pathlib import Path

from inflight_client.load_test import plot
from inflight_client.load_test.profile import LevelResult
from inflight_client.load_test.report import COLUMNS, load_sentence, row, to_json
from inflight_client.load_test.runner import LoadTestReport

_STYLE = """
  :root { color-scheme: light; --ink: #1f2933; --muted: #616e7c; --line: #e4e7eb; --paper: #ffffff; --back: #f5f7fa; }
  * { box-sizing: border-box; }
  body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
  main { max-width: 1240px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
  h1 { font-size: 1.6rem; margin: 0; }
  h2 { font-size: 1.05rem; margin: 0 0 .8rem; }
  .sub { color: var(--muted); margin: .2rem 0 1.8rem; }
  .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 1rem; }
  .card, section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
  .card { padding: 1rem 1.2rem; }
  .card b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
  .card span { color: var(--muted); font-size: .85rem; }
  section { margin-top: 1.2rem; padding: 1.2rem; overflow-x: auto; }
  svg { width: 100%; min-width: 900px; height: auto; display: block; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; white-space: nowrap; }
  th, td { padding: .45rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
  th { color: var(--muted); font-weight: 600; font-size: .8rem; }
  th:first-child, td:first-child { text-align: left; }
  tr:last-child td { border-bottom: 0; }
  .note { color: var(--muted); font-size: .85rem; margin: .4rem 0 0; }
"""

_NOTES = (
    "Every prompt is sent once, so no cache answers for the model. Throughput is over the time from the first request "
    "sent to the last response.",
    "Time to first token is until the first response. A response may carry several tokens: inter-token latency spreads "
    "the gap before a response evenly over its tokens.",
)


def write_page(report: LoadTestReport, path: Path) -> None:
    path.write_text(page(report), encoding="utf-8")


def page(report: LoadTestReport) -> str:
    facts = to_json(report)
    machine = f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores"
    started = report.started.strftime("%Y-%m-%d %H:%M UTC")
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "\n".join(_row(result) for result in report.levels)
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
<section><h2>Over load</h2>{plot.svg(report)}</section>
<section><h2>Figures</h2><table><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table>{notes}</section>
</main>
</body>
</html>
"""


def _cards(report: LoadTestReport) -> str:
    best = max(report.levels, key=lambda result: result.output_tokens_per_s)
    lightest = min(report.levels, key=lambda result: result.time_to_first_token.p50)
    cards = (
        (f"{best.output_tokens_per_s:,.0f}", f"output tokens/s at {best.name}, the most"),
        (f"{best.requests_per_s:.1f}", f"requests/s at {best.name}"),
        (
            f"{lightest.time_to_first_token.p50:.1f} ms",
            f"time to first token, p50, at {lightest.name}",
        ),
        (f"{sum(result.num_requests for result in report.levels):,}", "requests, none failed"),
    )
    return "".join(f'<div class="card"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in cards)


def _row(result: LevelResult) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row(result)) + "</tr>"
