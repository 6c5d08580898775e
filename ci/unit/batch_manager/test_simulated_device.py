"""The loop on a device whose steps take time: it does not wait for the host, and time changes nobody's tokens.

The host's times are those that `python -m ci.bench.host_work` measured last. The device's is what an 8B Llama in
bfloat16 takes at least; see there.

pytest ci/unit/batch_manager/test_simulated_device.py
"""

from __future__ import annotations

import json
from random import Random

import pytest
from harness import Harness, make_request
from simulated_device import Latencies, SimulatedDevice

from ci.bench.host_work import DEVICE_US, LAUNCH_US, RESULTS
from inflight.batch_manager import gpt_manager
from inflight.config import SchedulerPolicy
from inflight.request import Request
from inflight.result import FinishReason

EAGER_LAUNCH_US = 14_000.0
"""Of the 337 launches of a step without graphs, at best."""


def measured_host_us(batch: int) -> float:
    """Of a slow step: the 99th percentile."""
    newest = max(RESULTS.glob("host-*.json"))
    cases = json.loads(newest.read_text())["cases"]
    return max(float(case["p99"]) for case in cases if case["batch"] == batch)


def idle_share(batch: int, launch_us: float = LAUNCH_US) -> float:
    """Of a device that decodes full batches, in which requests end and others take their rows."""
    latencies = Latencies(device=lambda step: DEVICE_US, host=measured_host_us(batch), launch=launch_us)
    harness = Harness(
        num_blocks=20 * batch,
        max_batch_size=batch,
        max_num_tokens=8192,
        runner={"latencies": latencies},
        runner_type=SimulatedDevice,
    )
    harness.submit(*(make_request(number, 4, 6 + number % 20, streaming=True) for number in range(1, 2 * batch)))
    harness.run_until_idle()
    for number in (1, batch, 2 * batch - 1):
        assert harness.tokens(number) == harness.expected(number)
    assert isinstance(harness.runner, SimulatedDevice)
    return harness.runner.idle_share


@pytest.mark.parametrize("batch", [32, 256])
def test_the_device_does_not_wait_for_the_host(batch: int) -> None:
    assert idle_share(batch) <= 0.02


def test_a_device_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle_share(32, EAGER_LAUNCH_US) > 0.5
    monkeypatch.setattr(gpt_manager, "MAX_OUTSTANDING_STEPS", 1)
    assert idle_share(32) > 0.05


def requests() -> list[Request]:
    """More than there are rows and blocks for. Some end at a stop word, which the host sees a step late."""
    made = []
    for number in range(1, 13):
        request = make_request(number, 3 + number, 24, streaming=number % 2 == 0, seed=number)
        if number % 3 == 0:
            tokens = alone(request)
            request = make_request(number, 3 + number, 24, seed=number, stop_words=[tokens[7:9]])
        made.append(request)
    return made


def alone(request: Request) -> list[int]:
    return Harness().serve(request)[request.request_id]


def serve(host: float, device: float, dice: Random, cancelled: dict[int, float] | None = None) -> tuple[Harness, int]:
    """`device`: multiplied by what `dice` says. `cancelled`: request id -> time in µs. Returns also how many sequences
    were paused at a time, at most."""
    due = dict(cancelled or {})
    most_paused = 0

    def look(now: float) -> None:
        nonlocal most_paused
        most_paused = max(most_paused, harness.scheduler.num_paused)
        late = {number for number, time in due.items() if time <= now}
        harness.stops |= late
        for number in late:
            del due[number]

    def duration(step: object) -> float:
        return device * dice.uniform(0.1, 3.0)

    harness = Harness(
        num_blocks=24,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        runner={"latencies": Latencies(device=duration, host=host, launch=100.0), "passed": look},
        runner_type=SimulatedDevice,
    )
    harness.submit(*requests())
    harness.run_until_idle()
    assert harness.kv_cache.num_free_blocks == harness.kv_cache.num_blocks
    assert all(harness.num_finals(number) == 1 for number in harness.requests)
    return harness, most_paused


@pytest.mark.parametrize(("host", "device"), [(100.0, 5000.0), (5000.0, 100.0), (1000.0, 1000.0)])
def test_stops_and_pauses_are_exact_whoever_is_the_slower(host: float, device: float) -> None:
    harness, most_paused = serve(host, device, Random(5))
    assert most_paused, "there was room for all"
    for number in harness.requests:
        assert harness.tokens(number) == harness.expected(number)
    assert sum(harness.reason(number) is FinishReason.STOP_WORDS for number in harness.requests) == 4


@pytest.mark.parametrize("seed", range(8))
def test_cancels_amid_a_step_end_their_request_and_touch_no_other(seed: int) -> None:
    dice = Random(seed)
    cancelled = {number: dice.uniform(0, 40_000) for number in (2, 5, 7)}
    harness, _ = serve(dice.uniform(50, 2000), dice.uniform(50, 2000), dice, cancelled)
    for number in harness.requests:
        tokens = harness.tokens(number)
        if harness.reason(number) is FinishReason.CANCELLED:
            assert number in cancelled and tokens == harness.expected(number)[: len(tokens)]
        else:
            assert tokens == harness.expected(number)
