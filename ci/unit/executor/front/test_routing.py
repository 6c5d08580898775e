"""Which replica gets a request: by cached prefix, against load, and the same one each time.

pytest ci/unit/executor/front/test_routing.py
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.executor.front.routing import MAX_BLOCKS, Placement, PrefixTable, Router
from inflight.lora import LoraConfig, LoRARequest
from inflight.request import Request

BLOCK = 4
CACHE = 4096
PROMPT = list(range(33))


def router(num_replicas: int = 2, block_size: int = BLOCK, cache_tokens: int = CACHE) -> Router:
    made = Router(num_replicas, block_size)
    for replica in range(num_replicas):
        made.expect(replica, cache_tokens)
    return made


def prompt_of(tokens: list[int], **fields: Any) -> Request:
    return Request(input_token_ids=tokens, max_tokens=8, **fields)


def send(made: Router, request: Request, replicas: Collection[int] = (0, 1)) -> Placement:
    prefix, num_tokens = made.prefix(request), len(request.input_token_ids)
    return made.place(num_tokens, prefix, made.choose(num_tokens, prefix, replicas))


def test_requests_of_equal_length_take_turns() -> None:
    made = router()
    placed = [send(made, prompt_of([number] * 9)).replica for number in range(6)]
    assert placed == [0, 1] * 3


def test_a_prefix_draws_requests_to_the_replica_that_has_it() -> None:
    made = router()
    first = send(made, prompt_of(PROMPT))
    other = send(made, prompt_of([99] * 33))
    assert (first.replica, other.replica) == (0, 1)
    for placement in (first, other):
        placement.note_tokens(1)
        placement.end()
    assert send(made, prompt_of([99] * 33 + [1])).replica == 1
    assert send(made, prompt_of([*PROMPT, 1, 2, 3])).replica == 0


def test_load_outweighs_a_prefix_once_more_tokens_wait_than_it_saves() -> None:
    made = router()
    send(made, prompt_of(PROMPT)).note_tokens(1)  # 34 tokens are there, 32 of them would be saved
    assert send(made, prompt_of(PROMPT)).replica == 1
    made = router()
    placement = send(made, prompt_of(PROMPT))
    placement.note_tokens(1)
    placement.end()
    send(made, prompt_of([7] * 20), replicas=[0]).note_tokens(1)
    assert send(made, prompt_of(PROMPT)).replica == 0, "21 wait, 32 are saved"


def test_a_prompt_that_waits_weighs_more_than_one_that_is_computed() -> None:
    made = router()
    computed = send(made, prompt_of([1] * 20), replicas=[0])
    send(made, prompt_of([2] * 20), replicas=[1])
    computed.note_tokens(1)
    assert send(made, prompt_of([3] * 20)).replica == 0


def test_idle_replicas_fill_their_caches_evenly() -> None:
    made = router(3)
    placed = []
    for number in range(6):
        placement = send(made, prompt_of([number] * 9), replicas=range(3))
        placed.append(placement.replica)
        placement.end()
    assert placed == [0, 1, 2] * 2


def test_only_those_that_serve_are_chosen_and_one_that_is_back_has_nothing_cached() -> None:
    made = router()
    send(made, prompt_of(PROMPT)).end()
    assert send(made, prompt_of(PROMPT), replicas=[1]).replica == 1
    made.expect(0, CACHE)
    again = send(made, prompt_of(PROMPT), replicas=[0])
    again.note_tokens(1)
    assert made.num_requests(0) == 1 and made.num_requests(1) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "mine"},
        {"lora_request": LoRARequest("tale")},
        {"lora_config": LoraConfig(7)},
    ],
    ids=["salt", "adapter by name", "adapter by number"],
)
def test_who_shares_no_cached_block_shares_no_hash(fields: dict[str, Any]) -> None:
    made = router()
    plain, own = made.prefix(prompt_of(PROMPT)), made.prefix(prompt_of(PROMPT, **fields))
    assert len(plain) == len(own) == 8 and not set(plain) & set(own)
    assert own == made.prefix(prompt_of(PROMPT, **fields))


def test_a_block_is_shared_only_behind_equal_ones_and_the_last_token_is_always_computed() -> None:
    made = router()
    one, other = made.prefix(prompt_of(PROMPT)), made.prefix(prompt_of([99, *PROMPT[1:]]))
    assert not set(one) & set(other)
    assert len(made.prefix(prompt_of(PROMPT[:32]))) == 7
    assert made.prefix(prompt_of([])) == []


def test_without_reuse_or_without_a_choice_nothing_is_hashed() -> None:
    assert router(block_size=0).prefix(prompt_of(PROMPT)) == []
    assert router(1).prefix(prompt_of(PROMPT)) == []
    assert send(router(1), prompt_of(PROMPT), replicas=[0]).replica == 0


def test_a_table_holds_as_much_as_the_cache_and_loses_a_prefix_from_its_end() -> None:
    table = PrefixTable()
    table.limit(3)
    first, second = [b"a", b"b"], [b"c", b"d"]
    table.add(first)
    table.add(second)
    assert len(table) == 3 and (table.match(first), table.match(second)) == (1, 2)
    table.limit(2**40)
    table.add([number.to_bytes(4, "big") for number in range(MAX_BLOCKS + 5)])
    assert len(table) == MAX_BLOCKS


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9), st.booleans()), max_size=30))
def test_loads_return_to_zero(history: list[tuple[int, int, bool]]) -> None:
    made = router(3)
    placed = []
    for num_tokens, num_new, ends in history:
        placement = send(made, prompt_of([5] * num_tokens), replicas=range(3))
        for _ in range(num_new):
            placement.note_tokens(1)
        placed.append(placement)
        if ends:
            placed.pop(0).end()
    for placement in placed:
        placement.end()
    for load in made._loads:
        assert (load.num_requests, load.num_prompt_tokens, load.num_tokens) == (0, 0, 0)
