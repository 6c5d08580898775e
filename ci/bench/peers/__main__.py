"""`python -m ci.bench.peers`: this engine on CPUs against other engines, interleaved, each in a process of its own.

Round by round every engine gets the same requests, one engine at a time. The first round warms up and is not counted.
Peers are installed into environments of their own at the first run; one that cannot be is named with the reason.
Prints a table and one line of JSON, and keeps a result file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.bench.checkpoint import SHAPES, make_checkpoint
from ci.bench.local_packages import LOCAL
from ci.bench.peers.families import FAMILIES, make_family
from ci.bench.peers.installation import Unavailable, model_of, python_of
from ci.bench.peers.peer import INFLIGHT, WORKERS, Contender
from ci.bench.peers.rows import Row, as_data, rate_of, show, summarise
from ci.bench.peers.worker_process import WorkerProcess, worker_path
from ci.bench.report import machine, result_path
from ci.bench.workload import Job, batch_jobs, prompt

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
SEED = 20
WARM_UP_JOBS = 4
"""Of case (b), in the round that is not counted."""
DEFAULT = (
    "inflight:bfloat16",
    "inflight:float32",
    "llama.cpp:bf16",
    "llama.cpp:q8_0",
    "llama.cpp:q4_0",
    "openvino-genai:f32",
    "openvino-genai:int8",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--jobs", type=int, default=32, help="requests of case (b)")
    parser.add_argument("--engines", nargs="+", default=DEFAULT, help="PEER:FORMAT[:VARIANT], see peer.py")
    parser.add_argument(
        "--shape", choices=[*SHAPES, *FAMILIES], default="135m", help="of the checkpoint, made if missing"
    )
    parser.add_argument(
        "--most-foreign", type=float, default=0.05, help="share of the cores above which a row is dropped"
    )
    parser.add_argument("--minutes", type=float, default=20, help="for each installation and conversion")
    parser.add_argument("--results", type=Path, default=ROOT / "ci" / "bench" / "results")
    options = parser.parse_args()
    try:
        contenders = [Contender.of(words) for words in options.engines]
    except ValueError as error:
        parser.error(str(error))

    folder = ROOT / "build" / f"bench-{options.shape}"
    if options.shape in SHAPES:
        checkpoint = make_checkpoint(folder, TOKENIZER, SHAPES[options.shape])
    else:
        checkpoint = make_family(folder, TOKENIZER, FAMILIES[options.shape])
    unavailable: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}
        for contender in contenders:
            try:
                worker = start(contender, checkpoint, options.minutes)
                stack.callback(worker.close)
                worker.await_ready()
                workers[str(contender)] = worker
            except (Unavailable, RuntimeError) as error:
                unavailable[str(contender)] = str(error)
                print(f"{contender} is left out: {error}", flush=True)
        rows = measure(workers, options.rounds, options.jobs, unavailable)
    summary = summarise(rows, options.most_foreign)
    show(summary, unavailable, options.most_foreign)
    found = machine() | {"shape": options.shape}
    path = result_path(options.results, "peers", found)
    result = {"machine": found, "summary": summary, "unavailable": unavailable}
    path.write_text(json.dumps(result | {"rows": as_data(rows)}, indent=1) + "\n")
    print(f"kept in {path}")
    print(json.dumps(result))
    return 0


def start(contender: Contender, checkpoint: Path, minutes: float) -> WorkerProcess:
    """Raises Unavailable."""
    peer = contender.peer
    python = python_of(peer, minutes)
    model = model_of(contender, python, checkpoint, minutes)
    variables = dict(peer.variants.get(contender.variant, {})) | {"PYTHONPATH": worker_path(peer is INFLIGHT)}
    log = LOCAL / f"worker-{str(contender).replace(':', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return WorkerProcess([str(python), str(WORKERS / peer.worker), str(model), contender.format], log, variables)


def measure(
    workers: Mapping[str, WorkerProcess], num_rounds: int, num_jobs: int, unavailable: dict[str, str]
) -> list[Row]:
    """The counted rounds. An engine that fails gets no further requests, and its reason is put into `unavailable`."""
    rows: list[Row] = []
    rng = random.Random(SEED)
    for number in range(num_rounds + 1):
        for case, jobs in round_of(rng, num_jobs if number else WARM_UP_JOBS).items():
            for name in (name for name in workers if name not in unavailable):
                try:
                    answer = workers[name].ask(jobs)
                except (OSError, RuntimeError) as error:
                    unavailable[name] = str(error)
                    continue
                row = Row(name, case, number, rate_of(case, jobs, answer), answer.foreign)
                print(
                    f"round {number or 'of warming up'}: {case} {name} {row.rate:,.1f} ({row.foreign:.1%} foreign)",
                    flush=True,
                )
                if number:
                    rows.append(row)
    return rows


def round_of(rng: random.Random, num_jobs: int) -> dict[str, Sequence[Job]]:
    """By case, in the order in which they are measured."""
    return {
        "decode": [Job(prompt(rng, 128), 128)],
        "batch": batch_jobs(rng, random.Random(SEED), num_jobs),
        "prefill": [Job(prompt(rng, 1024), 1)],
    }


if __name__ == "__main__":
    sys.exit(main())
