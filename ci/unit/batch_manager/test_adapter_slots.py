"""Adapters take slots, keep them while they are used, and leave them in order; who finds none waits without a loss."""

from __future__ import annotations

import random

import pytest
from harness import Harness, make_request
from msgspec import structs

from inflight.batch_manager.adapter_slots import AdapterSlots
from inflight.batch_manager.sequence import Sequence
from inflight.config import SchedulerPolicy
from inflight.lora import LoadedAdapter
from inflight.request import Request
from inflight.scheduler_output import NO_SLOT


def adapted(request: Request, uid: int) -> Request:
    return structs.replace(request, loaded_adapter=LoadedAdapter(uid, bytes([uid]))) if uid else request


def sequence(uid: int) -> Sequence:
    return Sequence(adapted(make_request(1, [1, 2], 3), uid), max_seq_len=16)


def test_an_adapter_is_loaded_once_and_shared() -> None:
    slots = AdapterSlots(2)
    first, second, other = sequence(7), sequence(7), sequence(8)
    assert [slots.take(each) for each in (first, second, other)] == [(0, 7), None, (1, 8)]
    assert [each.adapter_slot for each in (first, second, other)] == [0, 0, 1]
    assert not slots.has_room(sequence(9))
    assert slots.has_room(sequence(8))
    assert slots.has_room(sequence(0))
    slots.check([first, second, other])


def test_the_adapter_whose_last_user_left_first_gives_up_its_slot() -> None:
    slots = AdapterSlots(2)
    first, second, other = sequence(7), sequence(7), sequence(8)
    for each in (first, second, other):
        slots.take(each)
    assert [slots.release(each) for each in (first, other, second)] == [False, True, True]
    assert first.adapter_slot == NO_SLOT
    back = sequence(8)
    assert slots.take(back) is None, "it is still there"
    assert slots.take(sequence(9)) == (0, 9)
    assert not slots.has_room(sequence(7))


def test_after_a_reset_every_adapter_is_loaded_again() -> None:
    slots = AdapterSlots(1)
    user = sequence(7)
    slots.take(user)
    slots.release(user)
    slots.reset()
    assert slots.take(sequence(7)) == (0, 7)


def test_a_sequence_without_an_adapter_takes_none() -> None:
    slots = AdapterSlots(0)
    user = sequence(0)
    assert slots.has_room(user)
    assert slots.take(user) is None
    assert not slots.release(user)


def harness(num_slots: int, **options: object) -> Harness:
    return Harness(max_batch_size=4, block_size=4, num_blocks=200, num_adapter_slots=num_slots, **options)


def started(made: Harness) -> list[int]:
    """Ids of requests in the order in which they got their first token."""
    return list(made.responses)


def test_who_finds_no_slot_is_overtaken_by_those_without_an_adapter_only() -> None:
    made = harness(1)
    uids = {1: 7, 2: 8, 3: 7, 4: 0, 5: 8}
    for request_id, uid in uids.items():
        made.submit(adapted(make_request(request_id, [request_id, 2, 3], 4, streaming=True), uid))
    made.run_until_idle()
    assert started(made) == [1, 4, 2, 3, 5]
    loads = [load for step in made.runner.launched for load in step.adapter_loads]
    assert loads == [(0, 7), (0, 8), (0, 7), (0, 8)]


def test_who_waits_for_a_slot_keeps_its_place_in_a_static_batch() -> None:
    made = harness(1, policy=SchedulerPolicy.STATIC_BATCH)
    for request_id, uid, max_tokens in ((1, 7, 4), (2, 8, 4), (3, 0, 20)):
        made.submit(adapted(make_request(request_id, [request_id, 2, 3], max_tokens, streaming=True), uid))
    made.step()
    made.submit(make_request(4, [4, 2, 3], 4, streaming=True))
    while not made.num_finals(3):
        made.step()
        assert 4 not in made.responses, "a newcomer joins no batch of others"
    assert made.num_finals(2) == 1, "it joined its batch when there was a slot"
    made.run_until_idle()
    assert started(made) == [1, 3, 2, 4]


def test_a_stopped_sequence_that_waits_for_a_slot_leaves_nothing() -> None:
    made = harness(1)
    for request_id, uid in ((1, 7), (2, 8), (3, 7)):
        made.submit(adapted(make_request(request_id, [request_id, 2, 3], 20 if request_id == 1 else 4), uid))
    made.step()
    made.stops = {2}
    made.run_until_idle()
    assert list(made.responses) == [2, 3, 1], "3 waited only behind 2"
    assert all(len(responses) == 1 for responses in made.responses.values())


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize("seed", range(6))
def test_tokens_do_not_depend_on_slots_and_every_row_names_the_slot_of_its_adapter(
    policy: SchedulerPolicy, seed: int
) -> None:
    def run(num_slots: int) -> dict[int, list[int]]:
        rng = random.Random(seed)
        made = Harness(
            policy=policy,
            max_batch_size=4,
            block_size=4,
            num_blocks=24,
            max_num_tokens=12,
            num_adapter_slots=num_slots,
        )
        uids: dict[int, int] = {}
        for request_id in range(1, 25):
            uids[request_id] = rng.choice([0, 0, 1, 2, 3])
            prompt = [rng.randint(0, 50) for _ in range(rng.randint(1, 20))]
            made.submit(adapted(make_request(request_id, [request_id, *prompt], rng.randint(1, 20)), uids[request_id]))
            for _ in range(rng.randint(0, 3)):
                made.step()
                made.scheduler.check()
        made.run_until_idle()
        resident: dict[int, int] = {}
        for step in made.runner.launched:
            resident |= dict(step.adapter_loads)
            for new in step.new_sequences:
                uid = uids[new.token_ids[0]]
                assert (resident[new.adapter_slot] if uid else NO_SLOT) == (uid or new.adapter_slot)
        answers = {}
        for request_id, responses in made.responses.items():
            ((result, is_final, error),) = responses
            assert is_final and error is None
            answers[request_id] = result.output_token_ids
        return answers

    assert run(1) == run(2) == run(3)
