"""Sixty-four streams and five hundred requests: no response is lost or mixed up, and nothing is left.

pytest ci/L0_llm/test_load.py
"""

from __future__ import annotations

import random

from server_metrics import OUTCOMES, wait_until_settled
from server_process import ServerProcess
from workload import alone, mixed_requests, read_otherwise, together

from inflight_client import Client

STREAMS = 64
DIFFERENT = 50
REPEATED = 10


def test_each_of_five_hundred_requests_gets_what_it_gets_alone(server: ServerProcess, client: Client) -> None:
    requests = mixed_requests(DIFFERENT, seed=1)
    expected = alone(client, requests)
    crowd = [asked if turn % 2 else read_otherwise(asked) for asked in requests for turn in range(REPEATED)]
    random.Random(2).shuffle(crowd)
    before = wait_until_settled(server).by_label(OUTCOMES, "outcome")

    answers = together(client, crowd, STREAMS)

    by_content = {(asked.prompt, asked.options): answer for asked, answer in expected.items()}
    different = [
        (asked, answer, by_content[asked.prompt, asked.options])
        for asked, answer in zip(crowd, answers, strict=True)
        if answer != by_content[asked.prompt, asked.options]
    ]
    assert not different, f"{len(different)} of {len(crowd)} differ, the first: {different[0]}"
    after = wait_until_settled(server).by_label(OUTCOMES, "outcome")
    changes = {outcome: after[outcome] - before[outcome] for outcome in after}
    assert changes == {**dict.fromkeys(after, 0.0), "completed": float(len(crowd))}
