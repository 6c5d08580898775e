"""What was measured, row by row: which rows count, their medians, and how both are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ci.bench.peers.worker_process import Answer
from ci.bench.workload import CASES, Job


@dataclass(frozen=True, slots=True)
class Row:
    contender: str
    case: str
    round: int
    rate: float
    """Tokens per second."""
    foreign: float
    """The share of all cores that others used."""


def rate_of(case: str, jobs: Sequence[Job], answer: Answer) -> float:
    """Tokens per second: of "decode" after the first, of "prefill" the prompt's, of "batch" all that are output."""
    if case == "decode":
        return (answer.num_tokens - 1) / (answer.last - answer.first)
    if case == "prefill":
        return sum(len(job.prompt) for job in jobs) / answer.first
    return answer.num_tokens / answer.last


def undisturbed(rows: Sequence[Row], most_foreign: float) -> list[Row]:
    return [row for row in rows if row.foreign <= most_foreign]


def summarise(rows: Sequence[Row], most_foreign: float) -> dict[str, dict[str, dict[str, Any]]]:
    """Contender -> case -> median rate of the rows that count (None without any), how many do, how many were dropped,
    and the largest share of foreign load among those that count, or, without any, the smallest of all."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for contender in dict.fromkeys(row.contender for row in rows):
        own = [row for row in rows if row.contender == contender]
        summary[contender] = {}
        for case in dict.fromkeys(row.case for row in own):
            measured = [row for row in own if row.case == case]
            kept = undisturbed(measured, most_foreign)
            summary[contender][case] = {
                "rate": round(median(row.rate for row in kept), 1) if kept else None,
                "rows": len(kept),
                "dropped": len(measured) - len(kept),
                "foreign": round(max(row.foreign for row in kept) if kept else min(row.foreign for row in measured), 3),
            }
    return summary


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"rate": round(row.rate, 1), "foreign": round(row.foreign, 3)} for row in rows]


def show(summary: dict[str, dict[str, dict[str, Any]]], unavailable: dict[str, str], most_foreign: float) -> None:
    """The table, which rows were dropped, and why peers are missing."""
    console = Console(width=120)
    table = Table(title="tokens per second, medians of interleaved rounds, and the share of foreign load")
    table.add_column("engine")
    for case in CASES:
        table.add_column(case.text, justify="right")
    for contender, cases in summary.items():
        table.add_row(contender, *(_cell(cases.get(case.name)) for case in CASES))
    console.print(table)
    dropped = sum(cell["dropped"] for cases in summary.values() for cell in cases.values())
    if dropped:
        console.print(f"{dropped} rows were dropped: others used more than {most_foreign:.0%} of the cores meanwhile.")
    for contender, reason in unavailable.items():
        console.print(f"{contender} was not measured: {reason}", markup=False)


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["rate"] is None:
        return f"disturbed ({cell['foreign']:.0%} and more)"
    return f"{cell['rate']:,.1f} ({cell['foreign']:.0%})"
