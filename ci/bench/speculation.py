"""`python -m ci.bench.speculation`: sources of drafts against the same requests without, interleaved.

The network has the shape of the other benchmarks' and computes as much, but its embedding and head are made so that
each token has one successor: its greedy text is a chain that a prompt can hold, or hold nearly, or not at all. The
draft model has a tenth of its layers and the same chain, except for some tokens of one third of the chain and all of
another third. For lookahead decoding, whose guesses depend on what a network has learnt, stories of the default model
are measured too.

Besides the wall clock it reports the CPU time of the process, which other processes hardly change if the engine has one
thread (`--threads 1`). It counts the host's work as if none were done while a step runs.
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
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from ci.bench.checkpoint import TOKENIZER_FILES, VOCAB_SIZE, make_checkpoint
from ci.bench.engines import THREADS, engine_parameters
from ci.bench.report import machine
from inflight.config import EngineConfig
from inflight.executor.in_process import InProcessExecutor
from inflight.request import Request
from inflight.result import PerfMetrics
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import (
    NO_DRAFT_MODEL,
    NO_LOOKUP,
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
)
from inflight.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SEED = 7
NUM_TOKENS = {1: 256, 16: 96}
"""By the number of requests at a time."""
EDIT_EVERY = 12
DRAFT_LAYERS = 3
WRONG_EVERY = 4
PLAIN: dict[str, Any] = {"ngram_config": NO_LOOKUP, "draft_target_config": NO_DRAFT_MODEL}
DRAFT_MODEL = "draft model"
SOURCES: dict[str, dict[str, Any]] = {
    "lookup": {**PLAIN, "ngram_config": NGramDecodingConfig()},
    "lookahead": {**PLAIN, "lookahead_config": LookaheadDecodingConfig()},
    DRAFT_MODEL: {**PLAIN, "draft_target_config": DraftTargetDecodingConfig()},
}
"""Of drafts: fields of a Request."""
CASES = {
    "copy": "the output is a part of the prompt",
    "edit": f"the same, but every {EDIT_EVERY}th token differs",
    "new": "no token of the output is in the prompt",
    "misleading": "every pair of tokens of the output is in the prompt, followed by another token",
}
THIRDS = {
    "agreeing": "the draft model gives the same tokens",
    "differing": f"every {WRONG_EVERY}th of its tokens differs",
    "disagreeing": "all of them do",
}
"""Of the chain, as the draft model has it: its cases."""
STORIES = {"story": SamplingConfig(), "random story": SamplingConfig(temperature=0.8, top_p=0.95)}
"""How the default model samples."""
NAMES, PLACES = ("Tom", "Lily", "Ben", "Mia", "Sam", "Anna"), ("park", "forest", "garden", "house", "beach")


def chain() -> list[int]:
    """All tokens; the first follows the last."""
    order = list(range(VOCAB_SIZE))
    random.Random(SEED).shuffle(order)
    return order


def successors() -> list[int]:
    """Of each token."""
    order, found = chain(), [0] * VOCAB_SIZE
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


def drafted_successors() -> list[int]:
    """Of each token as the draft model has them: the wrong ones have each other's."""
    order, found = chain(), successors()
    differing = order[VOCAB_SIZE // 3 : 2 * VOCAB_SIZE // 3 : WRONG_EVERY]
    wrong = [*differing, *order[2 * VOCAB_SIZE // 3 :]]
    of_wrong = [found[token] for token in wrong]
    for token, following in zip(wrong, [*of_wrong[1:], of_wrong[0]], strict=True):
        found[token] = following
    return found


def make_draft_checkpoint(folder: Path, source: Path) -> Path:
    """The first layers of `source`, a chain, with a head of its own."""
    if not Path(folder, TOKENIZER_FILES[-1]).exists():
        config = AutoConfig.from_pretrained(source, num_hidden_layers=DRAFT_LAYERS)
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16)
        head = torch.empty_like(model.lm_head.weight)
        head[torch.tensor(drafted_successors())] = model.model.embed_tokens.weight.data
        model.lm_head.weight = torch.nn.Parameter(head)
        model.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(Path(source, name), folder)
    return folder


class Texts:
    """Prompts, new ones in every round."""

    def __init__(self) -> None:
        self._order = chain()
        self._successors = successors()
        self._rng = random.Random(SEED)

    def prompt(self, case: str, num_tokens: int) -> list[int]:
        third, place = VOCAB_SIZE // 3, self._rng.randrange(VOCAB_SIZE)
        if case in THIRDS:
            place = third * list(THIRDS).index(case) + place % (third - num_tokens)
        start = self._order[place]
        text = self._chain(start, num_tokens + 1)
        if case == "copy":
            return [*text, start]
        if case == "edit":
            return [*(self._other() if place % EDIT_EVERY == 5 else token for place, token in enumerate(text)), start]
        if case == "new" or case in THIRDS:
            return [self._other() for _ in text] + [start]
        return [token for pair in pairwise(text) for token in (*pair, self._other())] + [start]

    def _chain(self, token: int, length: int) -> list[int]:
        found = [token]
        while len(found) < length:
            found.append(self._successors[found[-1]])
        return found

    def _other(self) -> int:
        return self._rng.randrange(VOCAB_SIZE)


class Stories:
    """Beginnings of stories."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer.load(checkpoint)
        self._rng = random.Random(SEED)

    def prompt(self, case: str, num_tokens: int) -> list[int]:
        name, place = self._rng.choice(NAMES), self._rng.choice(PLACES)
        return self._tokenizer.encode(f"Once upon a time, {name} went to the {place}. {self._rng.choice(NAMES)} saw")


class Run(NamedTuple):
    rate: float
    """Output tokens per second, from the last request's first token on."""
    cpu_rate: float
    """The same per second of the process's CPU time."""
    outputs: list[list[int]]
    acceptance_rate: float
    """Accepted drafts of those verified."""
    tokens_per_step: float
    """Of one sequence, in the steps that it was in."""


class Engine:
    def __init__(self, checkpoint: Path, num_threads: int, draft_model: Path | None = None) -> None:
        parameters = {
            **engine_parameters(checkpoint),
            "speculative_model_dir": str(draft_model.resolve()) if draft_model else "",
            "max_batch_size": "64",
            "num_threads": str(num_threads),
            "max_tokens_in_paged_kv_cache": "32768",
        }
        self._executor = InProcessExecutor(EngineConfig.from_parameters(parameters))
        self._executor.start()

    def run(self, prompts: list[list[int]], options: dict[str, Any]) -> Run:
        """`options`: fields of the requests."""
        num_tokens = NUM_TOKENS[len(prompts)]
        outputs: dict[int, list[int]] = {}
        for prompt in prompts:
            request_id = self._executor.next_request_id()
            outputs[request_id] = []
            self._executor.enqueue_request(
                Request(
                    request_id=request_id,
                    input_token_ids=prompt,
                    max_tokens=num_tokens,
                    streaming=True,
                    **options,
                )
            )
        num_running, start, cpu_start, num_before = len(prompts), 0.0, 0.0, 0
        metrics: list[PerfMetrics] = []
        num_steps = 0
        while num_running:
            for response in self._executor.await_responses():
                assert response.result is not None, response.error_msg
                outputs[response.request_id] += response.result.output_token_ids
                num_running -= response.is_final
                if response.result.request_perf_metrics is not None:
                    num_steps += response.result.decoding_iter
                    metrics.append(response.result.request_perf_metrics)
            if not start and all(outputs.values()):
                start, cpu_start = time.perf_counter(), time.process_time()
                num_before = sum(map(len, outputs.values()))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        num_drafts = sum(each.total_draft_tokens for each in metrics)
        rate = sum(each.total_accepted_draft_tokens for each in metrics) / num_drafts if num_drafts else 0.0
        num_new = len(prompts) * num_tokens - num_before
        return Run(
            num_new / seconds,
            num_new / cpu_seconds,
            list(outputs.values()),
            rate,
            len(prompts) * num_tokens / num_steps,
        )

    def close(self) -> None:
        self._executor.shutdown()


def measure(
    engine: Engine, texts: Texts | Stories, num_rounds: int, cases: dict[str, SamplingConfig], source: str
) -> list[dict[str, Any]]:
    """`cases`: with how their tokens are chosen. `source`: of drafts."""
    found = defaultdict(list)
    for number in range(num_rounds):
        for case, sampling in cases.items():
            for batch, num_tokens in NUM_TOKENS.items():
                prompts = [texts.prompt(case, num_tokens) for _ in range(batch)]
                names = ("with", "without") if number % 2 else ("without", "with")
                drafts = {"with": SOURCES[source], "without": PLAIN}
                runs = {name: engine.run(prompts, {**drafts[name], "sampling_config": sampling}) for name in names}
                ours, plain = runs["with"], runs["without"]
                found[case, batch].append((ours, plain))
                rates = f"{ours.rate:.1f} / {plain.rate:.1f}, CPU {ours.cpu_rate:.1f} / {plain.cpu_rate:.1f}"
                print(f"round {number + 1}: {source}, {case} x {batch}: {rates}", flush=True)
    return [
        {
            "drafts": source,
            "case": case,
            "batch": batch,
            "with": round(median(ours.rate for ours, _ in pairs), 1),
            "plain": round(median(plain.rate for _, plain in pairs), 1),
            "ratio": round(median(ours.rate / plain.rate for ours, plain in pairs), 2),
            "ratio of CPU": round(median(ours.cpu_rate / plain.cpu_rate for ours, plain in pairs), 2),
            "accepted": round(median(ours.acceptance_rate for ours, _ in pairs), 2),
            "tokens a step": round(median(ours.tokens_per_step for ours, _ in pairs), 2),
            "same tokens": sum(ours.outputs == plain.outputs for ours, plain in pairs) == len(pairs),
        }
        for (case, batch), pairs in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=list(SOURCES))
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-135m", help="made if missing")
    parser.add_argument("--results", type=Path, default=ROOT / "ci" / "bench" / "results")
    options = parser.parse_args()
    default_model = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
    rows: list[dict[str, Any]] = []
    if options.cases:
        network = make_checkpoint(options.checkpoint, default_model)
        chained = make_chain_checkpoint(network.with_name(f"{network.name}-chain"), network)
        draft_model = make_draft_checkpoint(network.with_name(f"{network.name}-chain-draft"), chained)
        for source in options.sources:
            engine = Engine(chained, options.threads, draft_model if source == DRAFT_MODEL else None)
            cases = THIRDS if source == DRAFT_MODEL else options.cases
            rows += measure(engine, Texts(), options.rounds, dict.fromkeys(cases, SamplingConfig()), source)
            engine.close()
    engine = Engine(default_model, options.threads)
    for source in [source for source in options.sources if source != DRAFT_MODEL]:
        rows += measure(engine, Stories(default_model), options.rounds, STORIES, source)
    engine.close()
    table = Table(title="drafts, output tokens per second, medians of interleaved rounds")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading in ("drafts", "case") else "right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)
    found = machine()
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"speculation-{found['date'].replace(' ', '-').replace(':', '')}.json"
    path.write_text(json.dumps({"machine": found, "cases": rows}, indent=1) + "\n")
    print(f"kept in {path}")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
