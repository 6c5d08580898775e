"""`python -m ci.mutants`: plant small faults, one at a time, and tell which test catches each."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue

from ci.mutants.faults import Fault, Module, modules
from ci.mutants.judge import Finding, Judge
from ci.mutants.reach import Records, digest
from ci.mutants.record import keep, kept_faults, kept_findings, show
from ci.mutants.trials import Trials

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"


def main(arguments: list[str]) -> int:
    chosen = _options(arguments)
    root = chosen.root.resolve()
    BUILD.mkdir(parents=True, exist_ok=True)
    sources = {module.path: module for module in modules(root)}
    if chosen.faults.isdecimal():
        faults, expected = _drawn(sources, int(chosen.faults), chosen.seed), {}
        name = f"seed-{chosen.seed}-{chosen.faults}"
    else:
        file = Path(chosen.faults)
        faults, expected = kept_faults(file, chosen.only), kept_findings(file)
        name = f"again-{file.stem}"
        print(f"{len(faults)} faults of {file}", flush=True)
    state = BUILD / f"{name}-{digest(root)}.jsonl"
    findings = _known(state)
    if findings:
        print(f"{len(findings)} findings of an interrupted run are taken from {state}", flush=True)
    records = Records(root, BUILD, with_slow=chosen.slow)
    unreliable: set[str] = set()
    with ExitStack() as stack:
        judges: SimpleQueue[Judge] = SimpleQueue()
        for number in range(chosen.processes):
            trials = stack.enter_context(closing(Trials(root, BUILD / f"trials-{os.getpid()}-{number}")))
            judges.put(Judge(root, sources, trials, records, unreliable, servers=chosen.servers))
        if not trials.is_apart:
            print("Faulty programs run among all other processes: this system lets us make no namespaces.", flush=True)

        def judged(fault: Fault) -> tuple[Fault, Finding]:
            judge = judges.get()
            try:
                return fault, judge.judge(fault, expected.get(fault.name))
            finally:
                judges.put(judge)

        while waiting := [fault for fault in faults if fault.name not in findings]:
            for fault, finding in _as_completed(chosen.processes, judged, waiting):
                findings[fault.name] = finding
                with state.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps([fault.name, finding.as_json()]) + "\n")
                print(f"{finding.seconds:6.1f} s  {fault}\n          {finding}", flush=True)
            judge = judges.get()
            for test in judge.failing_anyway({finding.by for finding in findings.values() if finding.is_by_test}):
                print(f"fails without a fault too, and is not asked again: {test}", flush=True)
            judges.put(judge)
            findings = {name: finding for name, finding in findings.items() if finding.by not in unreliable}
    show(faults, findings, expected)
    if chosen.write is not None:
        keep(chosen.write, root, chosen.seed, sum(len(module.places) for module in sources.values()), faults, findings)
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    options.add_argument("--seed", type=int, default=None, help="of the sample; a random one unless given")
    options.add_argument("--faults", default="40", metavar="NUMBER|FILE", help="how many, or the file that keeps them")
    options.add_argument(
        "--only", action="append", metavar="NAME", help="of those kept: caught, survived, or a fault's name; repeatable"
    )
    options.add_argument("--slow", action="store_true", help="also ask slow unit tests, recorded first: half an hour")
    options.add_argument("--servers", action="store_true", help="also ask ci/L0_*: minutes for each fault")
    options.add_argument("--processes", type=int, default=2, help="how many faults are tried at a time")
    options.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="another checkout, to be measured")
    options.add_argument("--write", type=Path, metavar="FILE", help="keep the faults and what caught them")
    chosen = options.parse_args(arguments)
    if chosen.seed is None:
        chosen.seed = int.from_bytes(os.urandom(2), "big")
    if not chosen.faults.isdecimal() and not Path(chosen.faults).is_file():
        options.error(f"--faults: {chosen.faults} is neither a number nor a file")
    if chosen.only and chosen.faults.isdecimal():
        options.error("--only chooses from the faults that a file keeps: name it with --faults")
    return chosen


def _drawn(sources: dict[str, Module], number: int, seed: int) -> list[Fault]:
    places = [key for module in sources.values() for key in module.places]
    number = min(number, len(places))
    print(f"{number} faults of {len(places)} that could be planted; seed {seed}", flush=True)
    return [sources[key[0]].fault(key) for key in random.Random(seed).sample(places, number)]


def _as_completed(
    processes: int, judged: Callable[[Fault], tuple[Fault, Finding]], faults: list[Fault]
) -> Iterator[tuple[Fault, Finding]]:
    pool = ThreadPoolExecutor(processes)
    try:
        for future in as_completed([pool.submit(judged, fault) for fault in faults]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _known(state: Path) -> dict[str, Finding]:
    lines = state.read_text(encoding="utf-8").splitlines() if state.exists() else []
    return {name: Finding(**finding) for name, finding in map(json.loads, lines)}


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
