"""How long a request's blocks are worth keeping in the KV cache once nobody uses them.

It decides which cached prefixes are given up first when memory is needed, and nothing else: no tokens, no order of
requests. Names are those of TensorRT-LLM's KvCacheRetentionConfig.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import msgspec

from inflight.errors import InvalidRequest

DEFAULT_PRIORITY = 35
"""Of blocks that no request says anything about, and of those whose time is over."""
MAX_PRIORITY = 100
MAX_RANGES = 1024
MAX_DURATION_MS = 2**31 - 1


class Retention(NamedTuple):
    """What a request says about one block."""

    priority: int
    duration_ms: int | None
    """Time for which the priority holds, from when the last sequence gave the block back; None = for good."""


class TokenRangeRetentionConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of the blocks whose first token is one of `token_start` to `token_end` - 1, positions in the prompt."""

    token_start: int
    token_end: int | None = None
    """None = to the prompt's end."""
    priority: int = DEFAULT_PRIORITY
    """0 to 100; blocks of lower ones are given up first."""
    duration_ms: int | None = None
    """After so long without use the priority is the default one again; None = never."""


class KvCacheRetentionConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Retention of a request's blocks, those of its prompt by ranges, and those of generated tokens."""

    token_range_retention_configs: list[TokenRangeRetentionConfig] = []
    """In rising order, without overlaps. Of what is in no range nothing is said: blocks that are already cached keep
    the priority that they have, new ones get the default."""
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int | None = None

    @property
    def has_durations(self) -> bool:
        ranges = self.token_range_retention_configs
        return self.decode_duration_ms is not None or any(each.duration_ms is not None for each in ranges)

    def of_block(self, start: int, num_prompt_tokens: int) -> Retention | None:
        """What is said about a block whose first token is at position `start`; None = nothing."""
        if start >= num_prompt_tokens:
            return Retention(self.decode_retention_priority, self.decode_duration_ms)
        ranges = self.token_range_retention_configs
        index = bisect_right(ranges, start, key=lambda each: each.token_start) - 1
        if index < 0:
            return None
        found = ranges[index]
        if found.token_end is not None and start >= found.token_end:
            return None
        return Retention(found.priority, found.duration_ms)

    def validate(self) -> None:
        """Raise InvalidRequest with the reason if a value is out of range."""
        ranges = self.token_range_retention_configs
        if len(ranges) > MAX_RANGES:
            raise InvalidRequest(f"there are {len(ranges)} retention token ranges, more than {MAX_RANGES}")
        end: int | None = 0
        for each in ranges:
            if end is None or each.token_start < end:
                raise InvalidRequest("retention token ranges must rise from position 0 and must not overlap")
            if each.token_end is not None and each.token_end <= each.token_start:
                raise InvalidRequest(
                    f"a retention token range must end behind its start {each.token_start}, got {each.token_end}"
                )
            end = each.token_end
            _check("the priority of a retention token range", each.priority, each.duration_ms)
        _check("retention_decode_priority", self.decode_retention_priority, self.decode_duration_ms)


def _check(name: str, priority: int, duration_ms: int | None) -> None:
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_PRIORITY}, got {priority}")
    if duration_ms is not None and not 1 <= duration_ms <= MAX_DURATION_MS:
        raise InvalidRequest(f"the duration of {name} must be at least 1 ms, got {duration_ms}")
