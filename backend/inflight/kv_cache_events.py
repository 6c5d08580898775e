"""What happens to the cached blocks of the KV cache, for programs that route requests to where their prefix is cached.

Names are those of TensorRT-LLM's KVCacheEvent. Hashes are opaque: they are made with a secret of the engine, so nobody
can compute or aim at them, and they change with every launch. Stored blocks name their tokens, which are other
requests' prompts and answers: events are for programs of the engine's owner, and no client can ask for them.
"""

from __future__ import annotations

import msgspec

DEVICE_LEVEL, HOST_LEVEL = 0, 1


class KVCacheEventDiff(msgspec.Struct, frozen=True):
    old_value: int
    new_value: int


class KVCacheCreatedData(msgspec.Struct, frozen=True, kw_only=True, tag="created"):
    """The cache exists, with nothing in it. The first event of every launch."""

    num_blocks_per_cache_level: list[int]
    """On the device, and in host memory."""


class KVCacheStoredBlockData(msgspec.Struct, frozen=True, kw_only=True):
    block_hash: int
    tokens: list[int]
    lora_id: int | None = None
    """The adapter that its keys and values depend on; None = none."""
    cache_level: int = DEVICE_LEVEL
    priority: int


class KVCacheStoredData(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks that can be reused from now on, each the continuation of the one before."""

    parent_hash: int | None
    """Of the block before the first; None = it begins a prompt."""
    blocks: list[KVCacheStoredBlockData]


class KVCacheRemovedData(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """Blocks that are not known any more, on no level."""

    block_hashes: list[int]


class KVCacheUpdatedData(msgspec.Struct, frozen=True, kw_only=True, tag="updated"):
    """A block that moved to another level, or has another priority."""

    block_hash: int
    cache_level: KVCacheEventDiff | None = None
    """0 is the device, 1 the host's memory."""
    priority: KVCacheEventDiff | None = None


KVCacheEventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


class KVCacheEvent(msgspec.Struct, frozen=True, kw_only=True):
    event_id: int
    """Counts the events of a launch from 0. A gap means that events were dropped, because nobody fetched them in time:
    what is cached is then to be learnt anew."""
    data: KVCacheEventData
    replica: int = 0
    """Of the engine (data_parallel_size), whose cache it is; each counts its own events."""
