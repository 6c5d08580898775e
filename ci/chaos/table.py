"""What a run has shown: a row for each fault, as a table and as a file with machine, commit and date."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from ci.bench.report import machine, result_path
from ci.chaos.faults import NEVER, Fault
from ci.chaos.leaks import Growth, MiB
from ci.chaos.load import SHORTEST_PAUSE, Load, Stream
from ci.chaos.oracle import Injection, Verdict

RESULTS = Path(__file__).with_name("results")
COLUMNS = (
    "fault",
    "times",
    "in flight",
    "paused",
    "resumed",
    "ended",
    "lost",
    "different",
    "p50",
    "p95",
    "max",
    "back",
)
NUM_WAITS = 12
TITLE = "streams at each fault; pauses of streams, and the time until all serve as before, in seconds"


def row(name: str, injections: list[Injection], verdicts: dict[Stream, Verdict]) -> dict[str, Any]:
    """`ended`: with an error, as the fault may; `back`: the longest time until the server served as before."""
    counted: Counter[str] = Counter()
    pauses: list[float] = []
    for injection in injections:
        over = injection.over if injection.over is not None else float("inf")
        for stream in injection.in_flight:
            verdict = verdicts.get(stream, Verdict.LOST)
            pause = stream.pause(injection.began, over)
            is_paused = pause >= SHORTEST_PAUSE
            pauses += [pause] if is_paused else []
            counted["in flight"] += 1
            counted["paused"] += is_paused
            counted["resumed"] += is_paused and verdict is Verdict.EQUAL
            # A later fault may have ended it.
            counted[verdict.value] += verdict is not Verdict.ENDED or injection.allows_error(stream)
    backs = [each.serves - each.began for each in injections if each.serves is not None]
    return {
        "fault": name,
        "times": len(injections),
        **{key: counted[key] for key in ("in flight", "paused", "resumed", "ended", "lost", "different")},
        **dict(zip(("p50", "p95", "max"), _percentiles(pauses), strict=True)),
        "back": round(max(backs, default=0.0), 1),
    }


def summary(
    injections: list[Injection], verdicts: dict[Stream, Verdict], skipped: dict[Fault, str], growth: Growth
) -> dict[str, Any]:
    names = dict.fromkeys(injection.fault.name for injection in injections)
    rows = [row(name, [each for each in injections if each.fault.name == name], verdicts) for name in sorted(names)]
    memory = [
        {
            "process": life.role,
            "seconds": round(life.times[-1] - life.times[0]),
            "MiB": middle // MiB,
            "grew": added / MiB,
            "a minute": round(life.rate / MiB, 2),
            "looks": [
                [round((when - life.times[0]) / 60, 1), *(round(each / MiB, 1) for each in sizes)]
                for when, *sizes in life.looks
            ],
        }
        for life in growth.lives()
        for middle, added in [life.growth]
    ]
    return {
        "streams": {verdict.value: count for verdict, count in Counter(verdicts.values()).items()},
        "all": row("all", injections, verdicts),
        "faults": rows,
        "skipped": {**{fault.name: why for fault, why in skipped.items()}, **NEVER},
        "memory": [{**each, "grew": round(each["grew"], 1)} for each in memory],
    }


def longest_waits(load: Load, streams: Iterable[Stream]) -> list[dict[str, Any]]:
    """Of all streams that have ended: whoever stood still while others went on is seen here."""
    waits = [(stream, *stream.longest_wait) for stream in streams]
    return [
        {
            "request": stream.item.name,
            "seconds": round(end - start, 1),
            "others": load.num_arrivals(start, end),
            "responses": len(stream.arrivals),
        }
        for stream, start, end in nlargest(NUM_WAITS, waits, key=lambda wait: wait[2] - wait[1])
    ]


def show(found: dict[str, Any]) -> None:
    table = Table(title=TITLE)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for each in [*found["faults"], found["all"]]:
        is_bad = each["lost"] or each["different"]
        style = "red" if is_bad else "bold" if each is found["all"] else None
        table.add_row(*("" if each[key] is None else str(each[key]) for key in COLUMNS), style=style)
    console = Console(width=140)
    console.print(table)
    for name, why in found["skipped"].items():
        console.print(f"not injected: {name} ({why})", style="dim")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found["streams"].items()))
    console.print(f"all streams of the load: {counts}")
    for life in found["memory"]:
        console.print(
            f"{life['process']}: {life['MiB']} MiB, {life['grew']:+} MiB in the second half of {life['seconds']} s, "
            f"{life['a minute']:+} MiB a minute"
        )
        for at, kind in enumerate(("resident", "proportional"), 1):
            sizes = "".join(f"{look[at]:7}" for look in life["looks"][::3])
            console.print(f"  {kind:12} MiB, each third minute:{sizes}", style="dim")
    for wait in found["longest waits"]:
        console.print(
            f"{wait['seconds']:5.1f} s without a response, {wait['others']} of others meanwhile: {wait['request']}"
        )


def keep(found: dict[str, Any]) -> Path:
    described = machine()
    path = result_path(RESULTS, "chaos", described)
    path.write_text(json.dumps({"machine": described, **found}, indent=1) + "\n")
    return path


def _percentiles(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """Median, 95th percentile and maximum; None of no values."""
    if not values:
        return None, None, None
    cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
    return round(cuts[9], 1), round(cuts[18], 1), round(max(values), 1)
