"""`python -m ci.bench.speculation`: prompt lookup against the same requests without it, interleaved.

The network has the shape of the other benchmarks' and computes as much, but its embedding and head are made so that
each token has one successor: its greedy text is a chain that a prompt can hold, or hold nearly, or not at all.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from ci.bench.checkpoint import TOKENIZER_FILES, VOCAB_SIZE, make_checkpoint
from ci.bench.engines import engine_parameters
from ci.bench.report import machine
from inflight.config import EngineConfig
from inflight.executor.in_process import InProcessExecutor
from inflight.request import Request
from inflight.result import PerfMetrics
from inflight.speculative_decoding import NGramDecodingConfig

ROOT = Path(__file__).resolve().parents[2]
SEED = 7
NUM_TOKENS = 256
EDIT_EVERY = 12
BATCHES = (1, 16)
LOOKUP, PLAIN = NGramDecodingConfig(), NGramDecodingConfig(max_draft_len=0)
CASES = {
    "copy": "the output is a part of the prompt",
    "edit": f"the same, but every {EDIT_EVERY}th token differs",
    "new": "no token of the output is in the prompt",
    "misleading": "every pair of tokens of the output is in the prompt, followed by another token",
}


def successors() -> list[int]:
    """Of each token; all tokens are one cycle."""
    order = list(range(VOCAB_SIZE))
    random.Random(SEED).shuffle(order)
    found = [0] * VOCAB_SIZE
    for token, following in zip(order, [*order[1:], order[0]], strict=True):
        found[token] = following
    return found


def make_chain_checkpoint(folder: Path, source: Path) -> Path:
    """`source` with an embedding that outweighs the layers, and a head in which each token has the weights of the
    embedding of the one before it."""
    if not Path(folder, TOKENIZER_FILES[-1]).exists():
        config = AutoConfig.from_pretrained(source, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16)
        torch.manual_seed(SEED)
        embedding = torch.randn(VOCAB_SIZE, config.hidden_size, dtype=torch.bfloat16)
        head = torch.empty_like(embedding)
        head[torch.tensor(successors())] = embedding
        model.model.embed_tokens.weight.data = embedding
        model.lm_head.weight = torch.nn.Parameter(head)
        model.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(Path(source, name), folder)
    return folder


class Texts:
    """Prompts, new ones in every round."""

    def __init__(self) -> None:
        self._successors = successors()
        self._rng = random.Random(SEED)

    def prompt(self, case: str) -> list[int]:
        start = self._rng.randrange(VOCAB_SIZE)
        text = self._chain(start, NUM_TOKENS + 1)
        if case == "copy":
            return [*text, start]
        if case == "edit":
            return [*(self._other() if place % EDIT_EVERY == 5 else token for place, token in enumerate(text)), start]
        if case == "new":
            return [self._other() for _ in text] + [start]
        return [token for pair in pairwise(text) for token in (*pair, self._other())] + [start]

    def _chain(self, token: int, length: int) -> list[int]:
        found = [token]
        while len(found) < length:
            found.append(self._successors[found[-1]])
        return found

    def _other(self) -> int:
        return self._rng.randrange(VOCAB_SIZE)


class Engine:
    def __init__(self, checkpoint: Path) -> None:
        parameters = {**engine_parameters(checkpoint), "max_batch_size": "64"}
        self._executor = InProcessExecutor(EngineConfig.from_parameters(parameters))
        self._executor.start()

    def run(self, prompts: list[list[int]], ngram_config: NGramDecodingConfig) -> tuple[float, list[list[int]], float]:
        """Output tokens per second after the last request's first one, the outputs, and drafts accepted of those
        verified."""
        outputs: dict[int, list[int]] = {}
        for prompt in prompts:
            request_id = self._executor.next_request_id()
            outputs[request_id] = []
            self._executor.enqueue_request(
                Request(
                    request_id=request_id,
                    input_token_ids=prompt,
                    max_tokens=NUM_TOKENS,
                    streaming=True,
                    ngram_config=ngram_config,
                )
            )
        num_running, start, num_before = len(prompts), 0.0, 0
        metrics: list[PerfMetrics] = []
        while num_running:
            for response in self._executor.await_responses():
                assert response.result is not None, response.error_msg
                outputs[response.request_id] += response.result.output_token_ids
                num_running -= response.is_final
                if response.result.request_perf_metrics is not None:
                    metrics.append(response.result.request_perf_metrics)
            if not start and all(outputs.values()):
                start, num_before = time.perf_counter(), sum(map(len, outputs.values()))
        seconds = time.perf_counter() - start
        num_drafts = sum(each.total_draft_tokens for each in metrics)
        rate = sum(each.total_accepted_draft_tokens for each in metrics) / num_drafts if num_drafts else 0.0
        return (len(prompts) * NUM_TOKENS - num_before) / seconds, list(outputs.values()), rate

    def close(self) -> None:
        self._executor.shutdown()


def measure(engine: Engine, num_rounds: int, cases: list[str]) -> list[dict[str, Any]]:
    texts, rates, acceptance = Texts(), defaultdict(list), defaultdict(list)
    num_equal: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for number in range(num_rounds):
        for case in cases:
            for batch in BATCHES:
                prompts = [texts.prompt(case) for _ in range(batch)]
                modes = (LOOKUP, PLAIN) if number % 2 else (PLAIN, LOOKUP)
                found = {mode.max_draft_len > 0: engine.run(prompts, mode) for mode in modes}
                key = (case, batch)
                rates[key].append((found[True][0], found[False][0]))
                acceptance[key].append(found[True][2])
                num_equal[key].append(found[True][1] == found[False][1])
                print(f"round {number + 1}: {case} x {batch}: {found[True][0]:.1f} / {found[False][0]:.1f}", flush=True)
    return [
        {
            "case": case,
            "batch": batch,
            "lookup": round(median(with_lookup for with_lookup, _ in rates[case, batch]), 1),
            "plain": round(median(plain for _, plain in rates[case, batch]), 1),
            "ratio": round(median(ours / plain for ours, plain in rates[case, batch]), 2),
            "acceptance_rate": round(median(acceptance[case, batch]), 2),
            "same_tokens": all(num_equal[case, batch]),
        }
        for case in cases
        for batch in BATCHES
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-135m", help="made if missing")
    parser.add_argument("--results", type=Path, default=ROOT / "ci" / "bench" / "results")
    options = parser.parse_args()
    source = make_checkpoint(options.checkpoint, ROOT / "model_repository" / "llm" / "1" / "checkpoint")
    engine = Engine(make_chain_checkpoint(source.with_name(f"{source.name}-chain"), source))
    rows = measure(engine, options.rounds, options.cases)
    engine.close()
    table = Table(title="prompt lookup, output tokens per second, medians of interleaved rounds")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=100).print(table)
    found = machine()
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"speculation-{found['date'].replace(' ', '-').replace(':', '')}.json"
    path.write_text(json.dumps({"machine": found, "cases": rows}, indent=1) + "\n")
    print(f"kept in {path}")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
