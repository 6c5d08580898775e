"""BlockPool: reference counts, the order in which memory is given away, and hits that compare tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.batch_manager import block_pool
from inflight.batch_manager.block_pool import BlockPool


def cached_block(pool: BlockPool, tokens: list[int], parent: bytes = b"") -> tuple[int, bytes]:
    """Allocate a block and make it known under its hash."""
    (block_id,) = pool.allocate(1)
    block_hash = pool.hash_block(parent, tokens)
    pool.cache(block_id, block_hash, tokens)
    return block_id, block_hash


def test_used_and_free_add_up() -> None:
    pool = BlockPool(8, hash_key=b"k")
    first = pool.allocate(3)
    second = pool.allocate(5)
    assert sorted(first + second) == list(range(8))
    assert (pool.num_used, pool.num_free) == (8, 0)
    pool.check([first, second])
    pool.free(first)
    assert (pool.num_used, pool.num_free) == (5, 3)
    pool.check([second])


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(4, hash_key=b"k")
    block_id, _ = cached_block(pool, [1, 2])
    pool.share([block_id])
    pool.check([[block_id], [block_id]])
    pool.free([block_id])
    assert pool.num_used == 1
    pool.free([block_id])
    assert pool.num_used == 0


def test_a_freed_block_is_still_found_and_costs_a_free_block_to_share() -> None:
    pool = BlockPool(4, hash_key=b"k")
    block_id, block_hash = cached_block(pool, [1, 2])
    assert pool.num_revived([block_id]) == 0
    pool.free([block_id])
    assert pool.lookup(block_hash, [1, 2]) == block_id
    assert pool.num_revived([block_id]) == 1
    pool.share([block_id])
    assert (pool.num_used, pool.num_free) == (1, 3)


def test_blank_blocks_go_first_then_the_least_recently_freed_prefix() -> None:
    pool = BlockPool(4, hash_key=b"k")
    old, old_hash = cached_block(pool, [1])
    new, new_hash = cached_block(pool, [2])
    pool.free([old])
    pool.free([new])
    blanks = pool.allocate(2)
    assert not {old, new} & set(blanks)
    assert pool.allocate(1) == [old]
    assert pool.lookup(old_hash, [1]) is None
    assert pool.lookup(new_hash, [2]) == new


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(2, hash_key=b"k")
    head, head_hash = cached_block(pool, [1])
    tail, _ = cached_block(pool, [2], head_hash)
    pool.free([head, tail])
    assert pool.allocate(1) == [tail]
    assert pool.lookup(head_hash, [1]) == head


def test_equal_hash_with_other_tokens_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collision:
        def __init__(self, *_: object, **__: object) -> None: ...

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(block_pool, "blake2b", Collision)
    pool = BlockPool(4, hash_key=b"k")
    block_id, block_hash = cached_block(pool, [1, 2])
    assert pool.hash_block(b"", [3, 4]) == block_hash
    assert pool.lookup(block_hash, [3, 4]) is None
    assert pool.lookup(block_hash, [1, 2]) == block_id


def test_hashes_depend_on_parent_tokens_salt_and_key() -> None:
    pool, other = BlockPool(1, hash_key=b"k"), BlockPool(1, hash_key=b"other")
    root = pool.hash_root(b"")
    names = {
        pool.hash_block(root, [1, 2]),
        pool.hash_block(root, [1, 3]),
        pool.hash_block(pool.hash_block(root, [1, 2]), [1, 2]),
        pool.hash_block(pool.hash_root(b"salt"), [1, 2]),
        other.hash_block(other.hash_root(b""), [1, 2]),
    }
    assert len(names) == 5


def test_a_forgotten_block_is_found_no_more() -> None:
    pool = BlockPool(2, hash_key=b"k")
    block_id, block_hash = cached_block(pool, [1])
    pool.forget([block_id])
    assert pool.lookup(block_hash, [1]) is None
    pool.free([block_id])
    pool.check([])


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(2, hash_key=b"k")
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block_ids)


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(2, hash_key=b"k")
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free", "cache"]), st.integers(0, 30)), max_size=60))
def test_any_history_keeps_the_books(history: list[tuple[str, int]]) -> None:
    pool = BlockPool(6, hash_key=b"k")
    held: list[list[int]] = []
    for verb, number in history:
        if verb == "allocate" and 0 < number <= pool.num_free:
            held.append(pool.allocate(number))
        elif verb == "free" and held:
            pool.free(held.pop(number % len(held)))
        elif verb == "cache" and held:
            block_id = held[number % len(held)][0]
            pool.cache(block_id, pool.hash_block(b"", [number % 4]), [number % 4])
        elif verb == "share":
            block_id = pool.lookup(pool.hash_block(b"", [number % 4]), [number % 4])
            if block_id is not None:
                pool.share([block_id])
                held.append([block_id])
        pool.check(held)
