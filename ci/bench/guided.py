"""Guided decoding against free text: tokens per second of requests with a grammar, as a share of those without.

    .venv/bin/python -m ci.bench.guided [--rounds 5] [--model-path FOLDER]

CONCURRENCY requests at a time of one engine in this process, sampled, in interleaved rounds; the same prompts, seeds
and lengths with and without a JSON schema. Without --model-path two checkpoints: the default model, whose steps are so
short that the masks weigh most, and the one of `make bench`. Prints a line for each and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from ci.bench.checkpoint import make_checkpoint
from ci.bench.engines import THREADS
from ci.bench.workload import CONCURRENCY
from inflight.config import EngineConfig
from inflight.executor.in_process import InProcessExecutor
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.request import Request
from inflight.sampling_config import SamplingConfig

ROOT = Path(__file__).parents[2]
DEFAULT_MODEL = ROOT / "model_repository/llm/1/checkpoint"
END = 2
GOAL = 0.9
SCHEMA = GuidedDecodingParams(
    guide_type=GuideType.JSON_SCHEMA, guide='{"type": "array", "items": {"type": "string"}, "minItems": 30}'
)
"""Long enough that nearly every output is cut by its number of tokens."""
NUM_TOKENS, NUM_REQUESTS = 64, CONCURRENCY


def tokens_per_second(executor: InProcessExecutor, params: GuidedDecodingParams | None, seed: int) -> float:
    rng = random.Random(seed)
    requests = [
        Request(
            input_token_ids=[rng.randrange(3, 2000) for _ in range(24)],
            max_tokens=NUM_TOKENS,
            end_ids=[END],
            streaming=True,
            sampling_config=SamplingConfig(temperature=0.8, seed=number, min_tokens=NUM_TOKENS),
            guided_decoding_params=params,
        )
        for number in range(NUM_REQUESTS)
    ]
    waiting = iter(requests)
    start, num_tokens, num_running = time.perf_counter(), 0, 0
    for request in [next(waiting) for _ in range(CONCURRENCY)]:
        executor.enqueue_request(request)
        num_running += 1
    while num_running:
        for response in executor.await_responses():
            assert response.result is not None, response.error_msg
            num_tokens += len(response.result.output_token_ids)
            if response.is_final:
                num_running -= 1
                following = next(waiting, None)
                if following is not None:
                    executor.enqueue_request(following)
                    num_running += 1
    return num_tokens / (time.perf_counter() - start)


def measure(folder: Path, rounds: int) -> dict[str, float]:
    config = EngineConfig(
        gpt_model_path=str(folder),
        device="cpu",
        num_threads=THREADS,
        max_batch_size=CONCURRENCY,
        max_seq_len=512,
        max_tokens_in_paged_kv_cache=CONCURRENCY * 512,
    )
    free, guided = [], []
    with InProcessExecutor(config) as executor:
        for params in (None, SCHEMA):
            tokens_per_second(executor, params, 0)  # compiles the grammar, and warms up
        for number in range(rounds):
            free.append(tokens_per_second(executor, None, number))
            guided.append(tokens_per_second(executor, SCHEMA, number))
    ratios = [one / other for one, other in zip(guided, free, strict=True)]
    return {
        "free": statistics.median(free),
        "guided": statistics.median(guided),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model-path", type=Path)
    options = parser.parse_args()
    folders = {"given": options.model_path}
    if options.model_path is None:
        folders = {"default": DEFAULT_MODEL, "135m": make_checkpoint(ROOT / "build" / "bench-135m", DEFAULT_MODEL)}
    found = {name: measure(folder, options.rounds) for name, folder in folders.items()}
    for name, each in found.items():
        rates = f"free {each['free']:.0f}, guided {each['guided']:.0f} tokens/s"
        print(f"{name}: {rates}, ratio {each['ratio']:.2f} ({each['least']:.2f} to {each['most']:.2f}), goal {GOAL}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
