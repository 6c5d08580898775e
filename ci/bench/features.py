"""`python -m ci.bench.features`: what a feature gains or costs, against the same work without it, interleaved.

Round by round each case runs once with the feature, once without, and once with the feature in transformers (LoRA by
PEFT, grammars by XGrammar's processor), in turns of order, so that a machine which slows down slows down for all. The
first round warms up and is not counted. No server: the engine is in this process.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ci.bench import report
from ci.bench.adapters import make_adapters
from ci.bench.checkpoint import make_checkpoint
from ci.bench.engines import engine_config
from ci.bench.transformers_process import TransformersProcess
from ci.bench.workload import CONCURRENCY, prompt
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.lora import LoRARequest
from inflight.sampling_config import SamplingConfig
from inflight.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
SEED = 21
RANK = 8
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 400}
"""A schema that no output of a case has come to the end of."""


@dataclass(frozen=True, slots=True)
class Work:
    """What was done in how long."""

    num_tokens: int
    """Generated."""
    num_prompt_tokens: int
    """Computed."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


Requests = list[dict[str, Any]]
"""Arguments of generate_async, and `prompt`."""


@dataclass(frozen=True, slots=True)
class Case:
    text: str
    goal: str
    requests: Callable[[random.Random, bool], Requests]
    """Called with what to draw prompts from, and whether to use the feature."""
    peer: dict[str, Any]
    """The same in transformers: fields of transformers_peer.Batch besides the prompts and the number of tokens."""


def run(engine: GenerationExecutor, requests: Requests) -> Work:
    """All at once."""
    engine.get_stats()
    start = time.perf_counter()
    results: list[GenerationResult] = []
    for request in requests:
        options = {"end_ids": [], "sampling_config": SamplingConfig(), **request}
        results.append(engine.generate_async(options.pop("prompt"), **options))
    outputs = [result.result() for result in results]
    seconds = time.perf_counter() - start
    num_tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    num_prompt_tokens = sum(stats.inflight_batching_stats.num_ctx_tokens for stats in engine.get_stats())
    return Work(num_tokens, num_prompt_tokens, seconds)


def run_peer(process: TransformersProcess, case: Case, requests: Requests) -> Work:
    """One static batch."""
    prompts, num_tokens = [request["prompt"] for request in requests], requests[0]["max_tokens"]
    seconds = process.seconds(prompts, num_tokens, **case.peer)
    num_sequences = len(prompts) * case.peer.get("num_return_sequences", 1)
    return Work(num_sequences * num_tokens, num_sequences * len(prompts[0]), seconds)


def adapters(rng: random.Random, with_feature: bool) -> Requests:
    requests = []
    for number in range(CONCURRENCY):
        name = LoRARequest(f"a{number}") if with_feature else None
        requests.append({"prompt": prompt(rng, 32), "max_tokens": 96, "lora_request": name})
    return requests


def several_sequences(rng: random.Random, with_feature: bool) -> Requests:
    tokens, sampling = prompt(rng, 512), SamplingConfig(temperature=1.0, seed=rng.getrandbits(64))
    usual = {"prompt": tokens, "max_tokens": 32, "sampling_config": sampling}
    return [{**usual, "num_return_sequences": 8}] if with_feature else [usual] * 8


def beams(rng: random.Random, with_feature: bool) -> Requests:
    searched = {"sampling_config": SamplingConfig(beam_width=4), "num_return_sequences": 4} if with_feature else {}
    requests: Requests = [{"prompt": prompt(rng, 32), "max_tokens": 64, **searched} for _ in range(4)]
    return requests if with_feature else requests * 4


def guided(rng: random.Random, with_feature: bool) -> Requests:
    params = GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(NUMBERS))
    requests = []
    for _ in range(CONCURRENCY):
        sampling = SamplingConfig(temperature=1.0, seed=rng.getrandbits(64))
        request = {"prompt": prompt(rng, 32), "max_tokens": 96, "sampling_config": sampling}
        requests.append({**request, "guided_decoding_params": params, "end_ids": [2]} if with_feature else request)
    return requests


CASES = {
    "several sequences": Case(
        "8 sequences of a prompt of 512, against 8 requests",
        ">= 3x fewer prompt tokens",
        several_sequences,
        {"num_return_sequences": 8, "is_random": True},
    ),
    "beams": Case(
        "4 requests of 4 beams, all returned, against 16 requests",
        "none",
        beams,
        {"num_beams": 4, "num_return_sequences": 4},
    ),
    "adapters": Case(
        "16 requests with 16 LoRA adapters of rank 8, against 16 without",
        ">= 0.7x tokens/s",
        adapters,
        {"adapters": [f"a{number}" for number in range(CONCURRENCY)]},
    ),
    "guided": Case(
        "16 requests that follow a JSON schema, against 16 free ones",
        ">= 0.9x tokens/s",
        guided,
        {"schema": json.dumps(NUMBERS), "is_random": True},
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-135m", help="made if missing")
    parser.add_argument("--results", type=Path, default=ROOT / "ci" / "bench" / "results")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    options = parser.parse_args()

    checkpoint = make_checkpoint(options.checkpoint, TOKENIZER)
    lora_dir = make_adapters(ROOT / "build" / f"bench-lora-r{RANK}", CONCURRENCY, RANK)
    config = replace(
        engine_config(checkpoint),
        tokenizer_dir=str(TOKENIZER),
        max_loras=CONCURRENCY,
        lora_cache_max_adapter_size=RANK,
        lora_dir=str(lora_dir),
        max_beam_width=4,
    )
    peer = None if options.no_peer else TransformersProcess(checkpoint, TOKENIZER, lora_dir)
    with GenerationExecutor(InProcessExecutor(config), Tokenizer.load(TOKENIZER)) as engine:
        summary = {name: measure(engine, peer, CASES[name], options.rounds) for name in options.cases}
    if peer is not None:
        peer.close()
    show(summary)
    found = report.machine()
    path = report.result_path(options.results, "features", found)
    path.write_text(json.dumps({"machine": found, "cases": summary}, indent=1) + "\n", encoding="utf-8")
    print(f"kept in {path}")
    return 0


def measure(
    engine: GenerationExecutor, peer: TransformersProcess | None, case: Case, num_rounds: int
) -> dict[str, Any]:
    """Medians of the rounds' own ratios."""
    rates: dict[str, list[float]] = {"without": [], "transformers": []}
    prompts, rng = [], random.Random(SEED)
    for number in range(num_rounds + 1):
        runs: dict[str, Callable[[], Work]] = {
            "with": lambda: run(engine, case.requests(rng, True)),
            "without": lambda: run(engine, case.requests(rng, False)),
        }
        if peer is not None:
            runs["transformers"] = lambda: run_peer(peer, case, case.requests(rng, True))
        order = list(runs) if number % 2 else list(reversed(runs))
        found = {name: runs[name]() for name in order}
        if number:
            for name in rates.keys() & found.keys():
                rates[name].append(found["with"].rate / found[name].rate)
            prompts.append(found["with"].num_prompt_tokens / found["without"].num_prompt_tokens)
    summary: dict[str, Any] = {"text": case.text, "goal": case.goal, "prompt tokens": round(median(prompts), 3)}
    for name, ratios in rates.items():
        if ratios:
            summary[name] = {"ratio": round(median(ratios), 3), "rounds": [round(ratio, 3) for ratio in ratios]}
    return summary


def show(summary: dict[str, dict[str, Any]]) -> None:
    table = Table(title="tokens per second with the feature, medians of interleaved rounds")
    for column in ("case", ": without it", "goal", "prompt tokens computed", ": transformers"):
        table.add_column(column)
    for found in summary.values():
        peer = found.get("transformers", {"ratio": "-"})
        table.add_row(
            found["text"],
            f"{found['without']['ratio']}",
            found["goal"],
            f"{found['prompt tokens']}",
            f"{peer['ratio']}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
