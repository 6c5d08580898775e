"""Sixty streams over two ranks, half of which end early at random: the others are unaffected, and nothing is left.

pytest ci/L0_backend/test_cancel_storm.py
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

from raw_stream import Answer, RawStream
from server_metrics import OUTCOMES, Metrics, wait_for_rest
from server_process import ServerProcess
from waiting import until

STREAMS = 60
DIFFERENT = 10
KV_TOKENS = 1024
"""Room for some of the streams at a time, in blocks that a single request can take up wholly."""


class Fate(Enum):
    STAYS = "stays"
    LEAVES = "its client hangs up"
    IS_STOPPED = "another client stops it"


@dataclass(frozen=True)
class Part:
    """One stream, and whether and where it ends early."""

    number: int
    asked: int
    """Which of the different requests it sends."""
    fate: Fate
    after: int
    """Responses that it waits for until its fate; 0 finds it in the queue, or just started."""


def make_requests(dice: random.Random) -> list[dict[str, Any]]:
    """Different lengths and ways to sample; some begin alike and so share blocks."""
    return [
        {
            "text_input": "Once upon a time, there was a little duck. " * dice.choice((1, 3)) + f"Story {number}:",
            "max_tokens": dice.randint(20, 48),
            "end_id": -1,
            "stream": True,
            **({"temperature": 1.0, "seed": dice.getrandbits(60)} if number % 2 else {}),
        }
        for number in range(DIFFERENT)
    ]


def make_parts(dice: random.Random) -> list[Part]:
    fates = [Fate.STAYS] * (STREAMS // 2) + [Fate.LEAVES, Fate.IS_STOPPED] * (STREAMS // 4)
    dice.shuffle(fates)
    return [Part(number, number % DIFFERENT, fate, dice.choice((0, 1, 2, 5, 15))) for number, fate in enumerate(fates)]


def play(part: Part, inputs: dict[str, Any], url: str) -> Answer:
    """The part's answer, as far as it came."""
    stream = RawStream(url)
    try:
        request_id = f"storm-{part.number}"
        answer = stream.send(inputs, request_id=request_id)
        # Requests of one stream arrive in order: once this one is refused, the one before it is in flight.
        assert stream.ask({"max_tokens": 1}).error
        if part.fate is not Fate.STAYS:
            while len(answer.responses) < part.after and not answer.num_finals:
                stream.take()
        if part.fate is Fate.LEAVES:
            return answer
        if part.fate is Fate.IS_STOPPED:
            with RawStream(url) as other:
                other.ask({"stop": True}, request_id=request_id)
        stream.collect(answer)
        assert stream.ask({"max_tokens": 1}).error, "a second final response would have come before this"
        return answer
    finally:
        stream.close()


def test_half_of_sixty_streams_end_early() -> None:
    dice = random.Random(6)
    requests, parts = make_requests(dice), make_parts(dice)
    parameters = {
        "tensor_parallel_size": "2",
        "max_batch_size": "16",
        "max_tokens_in_paged_kv_cache": str(KV_TOKENS),
        "batch_scheduler_policy": "max_utilization",  # requests are also cancelled while they are paused
    }
    with ServerProcess(parameters=parameters) as server:
        with RawStream(server.grpc_url) as stream:
            alone = [stream.ask(inputs).token_ids for inputs in requests]
        until(lambda: Metrics(server).of(OUTCOMES, outcome="completed") == DIFFERENT, "all are counted")
        before = wait_for_rest(server).by_label(OUTCOMES, "outcome")

        with ThreadPoolExecutor(STREAMS) as threads:
            answers = list(threads.map(lambda part: play(part, requests[part.asked], server.grpc_url), parts))

        for part, answer in zip(parts, answers, strict=True):
            whole = alone[part.asked]
            if part.fate is Fate.STAYS:
                assert answer.token_ids == whole and not answer.error
            assert answer.token_ids == whole[: len(answer.token_ids)]
            assert answer.num_finals == 1 or part.fate is Fate.LEAVES
        check_outcomes(server, before)


def check_outcomes(server: ServerProcess, before: dict[str, float]) -> None:
    """Each of the storm's requests is counted once, and nothing went wrong."""

    def num_ended() -> float:
        counted = changes(server, before)
        return counted["completed"] + counted["cancelled"]

    until(lambda: num_ended() >= STREAMS, "every request is counted")
    counted = changes(server, before)
    # Those that would leave may have got their last token before.
    assert counted["completed"] >= STREAMS // 2 and counted["cancelled"] > 0
    assert {outcome for outcome, number in counted.items() if number} == {"completed", "cancelled", "rejected"}
    take_the_whole_cache(server)
    until(lambda: num_ended() > STREAMS, "the last request is counted")
    assert num_ended() == STREAMS + 1


def changes(server: ServerProcess, before: dict[str, float]) -> dict[str, float]:
    now = Metrics(server).by_label(OUTCOMES, "outcome")
    return {outcome: now[outcome] - before[outcome] for outcome in now}


def take_the_whole_cache(server: ServerProcess) -> None:
    """A request that can run only if no other holds a block, on any rank."""
    wait_for_rest(server)
    with RawStream(server.grpc_url) as stream:
        tokens = [10 + number % 200 for number in range(KV_TOKENS - 8)]
        answer = stream.ask({"input_ids": tokens, "max_tokens": 8, "end_id": -1, "exclude_input_in_output": True})
        assert len(answer.token_ids) == 8 and not answer.error
