"""`python -m ci.bench.starts TREE…`: how long `inflight serve` and `inflight openai` take until they serve.

Every tree (a checkout of this repository; this one unless given) starts its server in turn, for the same checkpoint of
135 M random parameters, with this environment's Python. Two times from the start of the command: until the server says
that it is ready, and until the first token has come back. The first round warms up, files and compiled layers, and is
not counted. A start beside which other processes used much of the cores is made again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil

from ci.bench.checkpoint import make_checkpoint
from ci.bench.peers.worker_process import busy_seconds, foreign_share
from ci.bench.report import machine, result_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
BENCH = ROOT / "build" / "bench-135m"
RESULTS = Path(__file__).parent / "results"
PATIENCE = 300.0
LOOK_SECONDS = 0.01
TRIES = 20
"""Of one start, until it is undisturbed."""
COMMANDS: Mapping[str, tuple[str, str, dict[str, object]]] = {
    # tritonserver listens once all its models are ready.
    "serve": ("/v2/health/ready", "/v2/models/llm/generate", {"text_input": "Once", "max_tokens": 1}),
    "openai": ("/health", "/v1/completions", {"model": "llm", "prompt": "Once", "max_tokens": 1}),
}
"""Command -> the path that says whether it serves, and a request of one token."""


def main(arguments: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m ci.bench.starts", description=__doc__)
    options.add_argument("trees", nargs="*", type=Path, default=[ROOT], metavar="TREE")
    options.add_argument("--rounds", type=int, default=3, help="counted rounds")
    options.add_argument("--most-foreign", type=float, default=0.1, help="share of the cores that others may use")
    options.add_argument("--no-file", action="store_true", help="keep no result file")
    chosen = options.parse_args(arguments)
    checkpoint = make_checkpoint(BENCH, CHECKPOINT)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for number in range(chosen.rounds + 1):
        for command in COMMANDS:
            for tree in chosen.trees:
                name = f"{command} {tree.resolve().name}"
                for _ in range(TRIES if number else 1):
                    times = start(tree.resolve(), command, checkpoint)
                    print(f"round {number or 'of warming up'}: {name}: {_shown(*times)}", flush=True)
                    if times[-1] <= chosen.most_foreign:
                        break
                if number:
                    found[name].append(times)
    summary = {name: [round(median(column), 2) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    for name, row in summary.items():
        print(f"{name}: {_shown(*row)}")
    here = machine()
    result = {"starts_s": summary, "rounds": chosen.rounds, **here}
    print(json.dumps(result))
    if not chosen.no_file:
        result_path(RESULTS, "starts", here).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def start(tree: Path, command: str, checkpoint: Path) -> tuple[float, float, float]:
    """Seconds until it is ready, seconds until the first token, and the share of the cores that others used."""
    health, path, request = COMMANDS[command]
    port = free_port()
    ports = ["--port", str(port)]
    if command == "serve":
        ports = ["--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0", "--no-demo"]
    sources = os.pathsep.join(str(tree / part) for part in ("backend", "kernels", "client"))
    busy, began = busy_seconds(), time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "inflight_client.cli", command, str(checkpoint), *ports],
        env={**os.environ, "PYTHONPATH": sources},
        cwd=tree,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            while _status(port, "GET", health) != http.client.OK:
                if process.poll() is not None or time.monotonic() - began > PATIENCE:
                    raise SystemExit(f"{command} in {tree} did not start")
                time.sleep(LOOK_SECONDS)
            ready = time.monotonic() - began
            if _status(port, "POST", path, json.dumps(request)) != http.client.OK:
                raise SystemExit(f"{command} in {tree} did not answer")
            answered = time.monotonic() - began
            used = busy_seconds() - busy
            root = psutil.Process(process.pid)
            clocks = [each.cpu_times() for each in (root, *root.children(recursive=True))]
            own = sum(each.user + each.system for each in clocks)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
    return ready, answered, foreign_share(used, own, answered, os.cpu_count() or 1)


def _shown(ready: float, answered: float, foreign: float) -> str:
    return f"ready after {ready:.2f} s, first token after {answered:.2f} s ({foreign:.0%} foreign)"


def _status(port: int, method: str, path: str, body: str | None = None) -> int:
    """Of the answer; 0 = nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except OSError:
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
