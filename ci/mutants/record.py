"""A sample of faults with what caught them: as a file that is kept, and as a table."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ci.mutants.faults import Fault
from ci.mutants.judge import CAUGHT, GONE, SURVIVED, Finding


def keep(path: Path, root: Path, seed: int, places: int, faults: list[Fault], findings: dict[str, Finding]) -> None:
    """One fault a line. Notes that stand in the file already are kept."""
    notes = {each["name"]: each["note"] for each in _read(path)["faults"] if "note" in each} if path.exists() else {}
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()
    head = {"commit": commit, "date": date.today().isoformat(), "seed": seed, "places": places}
    lines = []
    for fault in sorted(faults, key=lambda fault: (fault.path, fault.line, fault.key)):
        row = {**fault.as_json(), **findings[fault.name].as_json()}
        lines.append(json.dumps(row | ({"note": notes[fault.name]} if fault.name in notes else {}), ensure_ascii=False))
    text = json.dumps(head)[:-1] + ', "faults": [\n' + ",\n".join(lines) + "\n]}\n"
    path.write_text(text, encoding="utf-8")
    print(f"kept in {path}")


def kept_faults(path: Path, only: list[str] | None) -> list[Fault]:
    """`only`: results or names of faults; None: all."""
    rows = _read(path)["faults"]
    return [Fault.from_json(row) for row in rows if only is None or row["result"] in only or row["name"] in only]


def kept_findings(path: Path) -> dict[str, Finding]:
    """By the name of the fault."""
    names = Finding.__dataclass_fields__
    return {row["name"]: Finding(**{name: row[name] for name in names}) for row in _read(path)["faults"]}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def show(faults: list[Fault], findings: dict[str, Finding], expected: dict[str, Finding]) -> None:
    """A row for each part of the repository, the survivors, and what another state of the tree did otherwise."""
    counts: dict[str, Counter[str]] = {}
    for fault in faults:
        finding = findings[fault.name]
        for part in (_part(fault.path), "all"):
            counter = counts.setdefault(part, Counter())
            counter[finding.result] += 1
            counter[finding.stage if finding.result == CAUGHT else ""] += 1
    used = sorted({key for counter in counts.values() for key in counter} - {CAUGHT, SURVIVED, GONE, ""})
    table = Table("part", "faults", CAUGHT, "%", SURVIVED, GONE, *used)
    for part, counter in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        there = counter[CAUGHT] + counter[SURVIVED]
        share = f"{100 * counter[CAUGHT] / there:.0f}" if there else ""
        numbers = (there + counter[GONE], counter[CAUGHT], share, counter[SURVIVED], counter[GONE])
        table.add_row(part, *(str(each) for each in numbers), *(str(counter[key]) for key in used))
    console = Console(width=120)
    for fault in faults:
        if findings[fault.name].result == SURVIVED:
            console.print(f"survived: {fault.name} {fault}", markup=False, highlight=False)
    console.print(table)
    lost = [
        fault
        for fault in faults
        if fault.name in expected and expected[fault.name].result == CAUGHT and findings[fault.name].result == SURVIVED
    ]
    for fault in lost:
        console.print(f"no longer caught: {fault.name} {fault}", markup=False, highlight=False)
    if expected:
        gained = sum(
            expected[fault.name].result == SURVIVED and findings[fault.name].result == CAUGHT
            for fault in faults
            if fault.name in expected
        )
        console.print(f"{len(lost)} are no longer caught that were before, {gained} are caught now that were not")


def _part(path: str) -> str:
    """The room, or the package."""
    folders = path.split("/")[1:-1]
    return "/".join(folders[:2])
