"""`python -m ci.bench.features`: what a feature gains or costs, against the same work without it, interleaved.

Round by round each case runs once with the feature and once without, in turns of order, so that a machine which slows
down slows down for both. The first round warms up and is not counted. No server: the engine is in this process.
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


@dataclass(frozen=True, slots=True)
class Case:
    text: str
    goal: str
    measure: Callable[[GenerationExecutor, random.Random, bool], Work]
    """Called with the engine, what to draw prompts from, and whether to use the feature."""


def run(engine: GenerationExecutor, requests: list[dict[str, Any]]) -> Work:
    """All at once. Keys of a request: arguments of generate_async, and `prompt`."""
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


def adapters(engine: GenerationExecutor, rng: random.Random, with_feature: bool) -> Work:
    requests = []
    for number in range(CONCURRENCY):
        name = LoRARequest(f"a{number}") if with_feature else None
        requests.append({"prompt": prompt(rng, 32), "max_tokens": 96, "lora_request": name})
    return run(engine, requests)


def several_sequences(engine: GenerationExecutor, rng: random.Random, with_feature: bool) -> Work:
    tokens, sampling = prompt(rng, 512), SamplingConfig(temperature=1.0, seed=rng.getrandbits(64))
    usual = {"prompt": tokens, "max_tokens": 32, "sampling_config": sampling}
    return run(engine, [{**usual, "num_return_sequences": 8}] if with_feature else [usual] * 8)


def guided(engine: GenerationExecutor, rng: random.Random, with_feature: bool) -> Work:
    params = GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(NUMBERS))
    requests = []
    for _ in range(CONCURRENCY):
        sampling = SamplingConfig(temperature=1.0, seed=rng.getrandbits(64))
        request = {"prompt": prompt(rng, 32), "max_tokens": 96, "sampling_config": sampling}
        requests.append({**request, "guided_decoding_params": params, "end_ids": [2]} if with_feature else request)
    return run(engine, requests)


CASES = {
    "several sequences": Case(
        "8 sequences of a prompt of 512, against 8 requests", ">= 3x fewer prompt tokens", several_sequences
    ),
    "adapters": Case("16 requests with 16 LoRA adapters of rank 8, against 16 without", ">= 0.7x tokens/s", adapters),
    "guided": Case("16 requests that follow a JSON schema, against 16 free ones", ">= 0.9x tokens/s", guided),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-135m", help="made if missing")
    parser.add_argument("--results", type=Path, default=ROOT / "ci" / "bench" / "results")
    options = parser.parse_args()

    config = replace(
        engine_config(make_checkpoint(options.checkpoint, TOKENIZER)),
        tokenizer_dir=str(TOKENIZER),
        max_loras=CONCURRENCY,
        lora_cache_max_adapter_size=RANK,
        lora_dir=str(make_adapters(ROOT / "build" / f"bench-lora-r{RANK}", CONCURRENCY, RANK)),
    )
    with GenerationExecutor(InProcessExecutor(config), Tokenizer.load(TOKENIZER)) as engine:
        summary = {name: measure(engine, CASES[name], options.rounds) for name in options.cases}
    show(summary)
    found = report.machine()
    path = report.result_path(options.results, "features", found)
    path.write_text(json.dumps({"machine": found, "cases": summary}, indent=1) + "\n", encoding="utf-8")
    print(f"kept in {path}")
    return 0


def measure(engine: GenerationExecutor, case: Case, num_rounds: int) -> dict[str, Any]:
    """Medians of the rounds' own ratios, with the feature to without."""
    rates, prompts, rng = [], [], random.Random(SEED)
    for number in range(num_rounds + 1):
        order = (True, False) if number % 2 else (False, True)
        found = {with_feature: case.measure(engine, rng, with_feature) for with_feature in order}
        if number:
            with_it, without = found[True], found[False]
            rates.append(with_it.num_tokens / with_it.seconds / (without.num_tokens / without.seconds))
            prompts.append(with_it.num_prompt_tokens / without.num_prompt_tokens)
    return {
        "text": case.text,
        "tokens per second": round(median(rates), 3),
        "prompt tokens": round(median(prompts), 3),
        "goal": case.goal,
        "rounds": [round(rate, 3) for rate in rates],
    }


def show(summary: dict[str, dict[str, Any]]) -> None:
    table = Table(title="with the feature : without it, medians of interleaved rounds")
    for column in ("case", "tokens per second", "prompt tokens computed", "goal"):
        table.add_column(column)
    for found in summary.values():
        table.add_row(found["text"], f"{found['tokens per second']}", f"{found['prompt tokens']}", found["goal"])
    Console(width=110).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
