"""Seeded histories of requests, stops and failing steps, and a digest of all decisions in them."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from harness import Harness, make_request
from msgspec import structs

from inflight.config import SchedulerPolicy
from inflight.scheduler_output import SchedulerOutput

MAX_SEQ_LEN = 48
FORKING = range(1000, 1020)
"""Histories in which some requests have several sequences."""
SEEDS = (*range(60), 559, *FORKING)
"""559 is rare: a sequence is paused and starts again within one step."""
PREFIX = [(position * 11) % 97 for position in range(30)]


def digest_of_history(seed: int) -> str:
    """Serve history number `seed`; its digest covers every step, every callback and every response."""
    rng = random.Random(seed)
    harness = _make_harness(rng)
    num_requests = 0
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 0, 1, 1, 3])):
            num_requests += 1
            request = _make_request(rng, num_requests)
            if seed in FORKING:
                num_sequences = rng.randint(1, min(4, harness.scheduler.max_batch_size))
                request = structs.replace(request, num_return_sequences=num_sequences)
            harness.submit(request)
        if num_requests and rng.random() < 0.1:
            harness.stops = {rng.randint(1, num_requests)}
        harness.step()
    harness.run_until_idle()
    answers = [
        (request_id, [[result.output_token_ids, result.finish_reason] if result else str(error)
                      for result, _, error in responses])
        for request_id, responses in harness.responses.items()
    ]  # fmt: skip
    decided = [_plain(step) for step in harness.runner.launched]
    if seed in FORKING:
        decided.append([step.block_copies for step in harness.runner.launched])
    text = json.dumps([decided, harness.maxima, harness.calls, answers, harness.kv_cache.num_reused_blocks])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _make_harness(rng: random.Random) -> Harness:
    block_size, max_batch_size = rng.choice([1, 2, 4, 8]), rng.randint(1, 8)
    chunked = rng.random() < 0.8
    failing = {rng.randint(5, 60)} if rng.random() < 0.2 else set()
    return Harness(
        policy=rng.choice(list(SchedulerPolicy)),
        block_size=block_size,
        num_blocks=-(-(MAX_SEQ_LEN - 1) // block_size) + rng.randint(0, 60 // block_size),
        max_batch_size=max_batch_size,
        max_num_tokens=max_batch_size + rng.randint(0, 24) + (0 if chunked else MAX_SEQ_LEN),
        max_seq_len=MAX_SEQ_LEN,
        enable_chunked_context=chunked,
        enable_reuse=rng.random() < 0.7,
        runner={"fail_collect": failing.__contains__},
    )


def _make_request(rng: random.Random, request_id: int) -> Any:
    tail = [rng.randint(0, 96) for _ in range(rng.randint(1, 12))]
    return make_request(
        request_id,
        [*PREFIX[: rng.choice([0, 7, 16, 30])], *tail],
        rng.randint(1, 30),
        streaming=rng.random() < 0.7,
        priority=rng.choice([0.0, 0.5, 0.5, 1.0]),
        end_ids=rng.choice([[], [1, 2, 3, 4, 5, 6], list(range(0, 97, 5))]),
        min_tokens=rng.choice([0, 0, 3]),
        stop_words=rng.choice([[], [[rng.randint(0, 96)]]]),
        cache_salt=rng.choice(["", "", "a"]),
        seed=rng.randint(0, 5),
        log_probs=rng.random() < 0.3,
    )


def _plain(step: SchedulerOutput) -> Any:
    new = [[new.row, new.token_ids, new.num_prompt_tokens, new.block_ids] for new in step.new_sequences]
    work = [
        [work.row, work.start, work.num_tokens, work.token_ids, work.new_block_ids, work.num_sampled]
        for work in step.rows
    ]
    return [new, work]


if __name__ == "__main__":
    print(json.dumps([digest_of_history(seed) for seed in SEEDS], indent=0))
