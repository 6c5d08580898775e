"""`python -m ci.bench.structured_output`: whether guides are followed exactly, what that costs, and what harm they do.

Which schemas are taken and which values their grammars take, for the corpus of the unit tests and for each `--suite`
(a folder of the official JSON Schema suite's form); times on one core, for a made vocabulary of 128,000 tokens;
guides that are built to do harm; answers drawn from masks of the default model's vocabulary, validated. A table each,
one line of JSON, and a result file. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "ci" / "helpers"))

from answer_validity import Validity, corpus_schemas, default_vocabulary, made_schemas  # noqa: E402
from schema_corpus import corpus, official_cases  # noqa: E402
from schema_judgement import Coverage, coverage  # noqa: E402

from ci.bench.report import machine, result_path  # noqa: E402
from ci.bench.structured_output.guide_times import UNITS, guide_times  # noqa: E402
from ci.bench.structured_output.hostile import LIMIT_MS, MASK_LIMIT_MS, hostile_times  # noqa: E402
from ci.bench.structured_output.made_vocabulary import made_vocabulary  # noqa: E402

RESULTS = ROOT / "ci" / "bench" / "results"
PARTS = ("coverage", "times", "hostile", "answers")
ANSWERS, CORPUS_ANSWERS = 8, 4
"""To each schema."""
SEED = 26
MAX_REJECTED = 0.01
"""Share of valid values that may be rejected."""


def coverage_rows(found: dict[str, Coverage]) -> Iterable[tuple[Any, ...]]:
    for name, row in found.items():
        counts = (
            row.schemas,
            row.taken,
            len(row.refused),
            len(row.accepted),
            row.invalid,
            len(row.rejected),
            row.valid,
        )
        yield name, *counts


def show(title: str, headings: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> None:
    table = Table(title=title)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, (int, float)) else str(value) for value in row))
    Console(width=140).print(table)


def measure_coverage(suites: Iterable[Path]) -> dict[str, Any]:
    found = {"corpus": coverage(corpus())}
    for folder in suites:
        cases = list(official_cases(folder))
        found[folder.name] = coverage(cases)
        found[f"{folder.name}, required"] = coverage(case for case in cases if not case.name.startswith("optional/"))
    headings = ("", "schemas", "taken", "refused", "invalid accepted", "of", "valid rejected", "of")
    show("schemas at grammar level", headings, coverage_rows(found))
    for name, row in found.items():
        show(f"{name}: refused by keyword", ("keyword", "schemas"), row.keywords().items())
        for kind, values in (("invalid accepted", row.accepted), ("valid rejected", row.rejected)):
            for schema, value in values:
                print(f"{kind}: {schema}: {value[:100]}")
    return {
        name: {**asdict(row), "keywords": row.keywords(), "refused": len(row.refused)} for name, row in found.items()
    }


def measure_times(seed: int) -> dict[str, Any]:
    found = guide_times((case.schema for case in corpus()), made_vocabulary(seed), seed)
    rows = [(UNITS[name], *row.values()) for name, row in found.items()]
    show("128,000 tokens, microseconds of one core", ("", "count", "p50", "p99", "longest"), rows)
    return found


def measure_hostile(seed: int) -> dict[str, Any]:
    found = hostile_times(made_vocabulary(seed), seed)
    headings = ("guide", "front", "compile", "mask", "refused with")
    show("hostile guides, milliseconds", headings, ((name, *row.values()) for name, row in found.items()))
    return found


def measure_answers(seed: int, num_answers: int) -> dict[str, Any]:
    vocabulary = default_vocabulary()
    found: dict[str, Validity] = {
        "kinds that people use": made_schemas(vocabulary, seed, num_answers, ANSWERS),
        "corpus": corpus_schemas(vocabulary, seed, CORPUS_ANSWERS),
    }
    headings = ("", "schemas", "refused", "answers", "ended", "stopped", "not valid")
    rows = (
        (name, row.schemas, row.refused, row.answers, row.ended, row.stopped, len(row.failures))
        for name, row in found.items()
    )
    show("answers drawn from masks", headings, rows)
    for row in found.values():
        for schema, answer in row.failures:
            print(f"not valid: {answer[:200]} of {schema[:200]}")
    return {name: asdict(row) for name, row in found.items()}


def failures(found: dict[str, Any]) -> list[str]:
    """What breaks a goal, in words."""
    broken = []
    for name, row in found.get("coverage", {}).items():
        if row["accepted"]:
            broken.append(f"{name}: {len(row['accepted'])} invalid values are accepted")
        if len(row["rejected"]) > MAX_REJECTED * row["valid"]:
            broken.append(f"{name}: more than {MAX_REJECTED:.0%} of valid values are rejected")
    for name, row in found.get("hostile", {}).items():
        if row["front"] > LIMIT_MS or row["compile"] > LIMIT_MS:
            broken.append(f"{name}: decided after more than {LIMIT_MS} ms")
        if row["mask"] > MASK_LIMIT_MS:
            broken.append(f"{name}: a mask took more than {MASK_LIMIT_MS} ms")
    for name, row in found.get("answers", {}).items():
        if row["failures"]:
            broken.append(f"{name}: {len(row['failures'])} answers do not follow their schemas")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--suite", type=Path, action="append", default=[], help="a folder of the official suite's form")
    parser.add_argument("--answers", type=int, default=2000, help="to be drawn for schemas of the kinds people use")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    measures = {
        "coverage": lambda: measure_coverage(options.suite),
        "times": lambda: measure_times(options.seed),
        "hostile": lambda: measure_hostile(options.seed),
        "answers": lambda: measure_answers(options.seed, options.answers),
    }
    found = {part: measures[part]() for part in PARTS if part in options.parts}
    broken = failures(found)
    print("\n".join(broken) or "all goals are met")
    where = machine()
    path = result_path(options.results, "structured-output", where)
    path.write_text(json.dumps({"machine": where, "seed": options.seed, "broken": broken, **found}, indent=1) + "\n")
    print(f"kept in {path}")
    print(json.dumps(found))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
