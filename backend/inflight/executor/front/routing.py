"""Which of an engine's replicas gets a request: where the least is left to compute for it and for those before it.

The rule is the cost of NVIDIA Dynamo's KV router (docs.nvidia.com/dynamo, "Routing Concepts"), with its weight at its
default of 1, counted in tokens instead of blocks. Of each replica that serves

    cost = prompt tokens to compute, of this request and of those there without a token yet, cached ones left out
         + tokens to attend to, of this request and of all those there

and the lowest cost wins. So a request goes where its prefix is cached, until as many other tokens wait there as the
prefix would save. Among equal costs the replica with the fewest requests is taken, then the one whose cache is known to
hold the least, so that idle replicas fill theirs evenly, then the first: nothing is drawn at random.

What a replica has cached is not asked for. It is taken to be the prompts that this front has sent there, as far as its
KV cache holds so many blocks: the prefixes whose routing pays are those that return, and these pass through here. A
wrong guess costs time, never a token. Knows no lock, no socket and no state of ranks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b

from inflight.request import Request

HASH_BYTES = 16
MAX_BLOCKS = 2**16
"""Whose hashes are kept of each replica, at most: 6 MB."""
MAX_HASHED_BLOCKS = 2**12
"""Of one prompt: hashing a block takes 0.8 µs, and nobody is told apart behind 65,536 equal tokens."""


class PrefixTable:
    """Hashes of the blocks that one replica is taken to have cached; those not used for the longest time fall out."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self._capacity = MAX_BLOCKS

    def __len__(self) -> int:
        return len(self._hashes)

    def limit(self, num_blocks: int) -> None:
        """From now on it is that of a cache of so many blocks."""
        self._capacity = min(num_blocks, MAX_BLOCKS)

    def match(self, prefix: list[bytes]) -> int:
        """How many of a prompt's first blocks are here."""
        for index, block in enumerate(prefix):
            if block not in self._hashes:
                return index
        return len(prefix)

    def add(self, prefix: list[bytes]) -> None:
        # The last block first: a prefix loses its end before its beginning.
        for block in reversed(prefix):
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


@dataclass(slots=True)
class _Load:
    """What one replica has to do for this front."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    """That are not cached, of requests without a token yet."""
    num_tokens: int = 0
    """Of all its requests, prompts and output."""
    cached: PrefixTable = field(default_factory=PrefixTable)


@dataclass(slots=True)
class Placement:
    """Where a request is, and what it counts there until it ends."""

    replica: int
    _load: _Load
    _num_prompt_tokens: int
    _num_tokens: int

    def note_tokens(self, count: int) -> None:
        """So many new tokens of it have come, of which the first say that its prompt is computed."""
        load = self._load
        load.num_prompt_tokens -= self._num_prompt_tokens
        self._num_prompt_tokens = 0
        load.num_tokens += count
        self._num_tokens += count

    def end(self) -> None:
        """It is not there any more. To be called once."""
        self._load.num_requests -= 1
        self._load.num_prompt_tokens -= self._num_prompt_tokens
        self._load.num_tokens -= self._num_tokens


class Router:
    def __init__(self, num_replicas: int, block_size: int) -> None:
        """`block_size`: of the KV cache, in tokens; 0 = no prefix is shared."""
        self._loads = [_Load() for _ in range(num_replicas)]
        self._block_size = block_size if num_replicas > 1 else 0

    def prefix(self, request: Request) -> list[bytes]:
        """A hash of each full block of its prompt, and of all before it that prompts must have in common to share it.
        Empty where nothing is to be shared, or if there is no choice. Needs no lock."""
        if not self._block_size or not request.input_token_ids:
            return []
        num_blocks = min((len(request.input_token_ids) - 1) // self._block_size, MAX_HASHED_BLOCKS)
        content = array("q", request.input_token_ids[: num_blocks * self._block_size]).tobytes()
        size = self._block_size * array("q").itemsize
        block = blake2b(_identity(request), digest_size=HASH_BYTES).digest()
        hashes = []
        for start in range(0, len(content), size):
            block = blake2b(block + content[start : start + size], digest_size=HASH_BYTES).digest()
            hashes.append(block)
        return hashes

    def choose(self, num_tokens: int, prefix: list[bytes], replicas: Collection[int]) -> int:
        """The one of `replicas`, at least one, for a request of `num_tokens` prompt tokens."""
        if len(replicas) == 1:
            return next(iter(replicas))

        def rank(replica: int) -> tuple[int, int, int, int]:
            load = self._loads[replica]
            num_new = num_tokens - load.cached.match(prefix) * self._block_size
            cost = load.num_prompt_tokens + num_new + load.num_tokens + num_tokens
            return cost, load.num_requests, len(load.cached), replica

        return min(replicas, key=rank)

    def place(self, num_tokens: int, prefix: list[bytes], replica: int) -> Placement:
        """Count a request among those of `replica`. `num_tokens`: of its prompt, and of the output that is computed
        again with it."""
        load = self._loads[replica]
        num_new = num_tokens - load.cached.match(prefix) * self._block_size
        load.cached.add(prefix)
        load.num_requests += 1
        load.num_prompt_tokens += num_new
        load.num_tokens += num_tokens
        return Placement(replica, load, num_new, num_tokens)

    def num_requests(self, replica: int) -> int:
        """Requests that are placed at a replica."""
        return self._loads[replica].num_requests

    def expect(self, replica: int, num_cache_tokens: int) -> None:
        """New ranks serve it, whose KV cache is empty and holds so many tokens."""
        cached = self._loads[replica].cached
        cached.clear()
        cached.limit(num_cache_tokens // self._block_size if self._block_size else 0)


def _identity(request: Request) -> bytes:
    """As `Request.prefix_identity`, in which the leader later puts the adapter that is only named here."""
    adapter = ""
    if request.lora_request is not None:
        adapter = f"name {request.lora_request.lora_name}"
    elif request.lora_config is not None:
        adapter = f"number {request.lora_config.task_id}"
    return request.prefix_identity + b"\xffR" + adapter.encode()
