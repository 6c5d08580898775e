"""`python -m ci.bench.pauses`: how long a stream pauses when its rank is killed: if the next rank reads the weights, if
it maps them, and with a spare.

Engines that each stream in turn and lose their rank in the middle, free text and JSON. The pause is the longest time
between two of a stream's responses. A spare is loaded before each kill.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from ci.bench.checkpoint import make_checkpoint
from ci.bench.report import machine, result_path
from inflight.config import EngineConfig
from inflight.executor.executor import Executor
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.request import Request
from inflight.sampling_config import SamplingConfig
from inflight.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
RESULTS = Path(__file__).parent / "results"
PROMPT, NEW_TOKENS = [1, 10, 20, 30], 200
KILLED_AFTER = 20
"""Responses."""
BENCH = ROOT / "build" / "bench-135m"
ENGINES: dict[str, dict[str, int]] = {
    "weights are read": {"share_weights": False},
    "weights are mapped": {},
    "a spare": {"spare_ranks": 1},
}
"""What differs in their configuration."""
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 4 * NEW_TOKENS}},
    "required": ["text"],
}
GUIDES = {
    "": None,
    ", JSON": GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(SCHEMA)),
}
"""What streams follow."""


def main(arguments: list[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m ci.bench.pauses", description=__doc__)
    options.add_argument("--kills", type=int, default=10, help="of each engine")
    options.add_argument("--large", action="store_true", help="135 M parameters in bfloat16, not the default model")
    options.add_argument("--no-file", action="store_true", help="keep no result file")
    chosen = options.parse_args(arguments)
    config = EngineConfig(
        gpt_model_path=str(make_checkpoint(BENCH, CHECKPOINT) if chosen.large else CHECKPOINT),
        device="cpu",
        dtype="bfloat16" if chosen.large else "float32",
        num_threads=1,
        max_tokens_in_paged_kv_cache=65_536,
    )
    end_ids = Tokenizer.load(CHECKPOINT).end_ids
    pauses: dict[str, list[float]] = {name + kind: [] for name in ENGINES for kind in GUIDES}
    with ExitStack() as stack:
        executors = [stack.enter_context(Executor(config=replace(config, **options))) for options in ENGINES.values()]
        requests = {
            kind: Request(
                input_token_ids=PROMPT,
                max_tokens=NEW_TOKENS,
                streaming=True,
                sampling_config=SamplingConfig(temperature=1.0, seed=11),
                guided_decoding_params=params,
                end_ids=end_ids if params else [],
            )
            for kind, params in GUIDES.items()
        }
        expected = {kind: stream(executors[0], request, is_killed=False)[0] for kind, request in requests.items()}
        for _ in range(chosen.kills):
            # Of one engine not at once after each other: ranks that die again and again are launched later.
            for kind, request in requests.items():
                for (name, options), executor in zip(ENGINES.items(), executors, strict=True):
                    while executor.num_spares() < options.get("spare_ranks", 0):
                        time.sleep(0.1)
                    tokens, pause = stream(executor, request, is_killed=True)
                    assert tokens == expected[kind], "another stream"
                    pauses[name + kind].append(pause)
    table = Table(title=f"pause of a stream whose rank is killed, in seconds, {chosen.kills} kills each")
    for column in ("", "p50", "max"):
        table.add_column(column, justify="right" if column else "left")
    summary = {name: {"p50": round(median(times), 2), "max": round(max(times), 2)} for name, times in pauses.items()}
    for name, row in summary.items():
        table.add_row(name, f"{row['p50']:.2f}", f"{row['max']:.2f}")
    Console().print(table)
    found = machine()
    result = {
        "pauses_s": summary,
        "kills": chosen.kills,
        "large": chosen.large,
        **found,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))
    if not chosen.no_file:
        result_path(RESULTS, "pauses", found).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def stream(executor: Executor, request: Request, *, is_killed: bool) -> tuple[list[int], float]:
    """The tokens of a stream, and the longest time in seconds between two of its responses."""
    request_id = executor.enqueue_request(request)
    tokens: list[int] = []
    pause, before, number, is_final = 0.0, time.monotonic(), 0, False
    while not is_final:
        for response in executor.await_responses(request_id):
            assert response.result is not None, response.error_msg
            number += 1
            pause, before = max(pause, time.monotonic() - before) if number > 1 else 0.0, time.monotonic()
            tokens += response.result.output_token_ids
            is_final = response.is_final
            if number == KILLED_AFTER and is_killed:
                os.kill(executor.engine_pids()[0], signal.SIGKILL)
    return tokens, pause


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
