"""What a sequence without blocks may start on."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.batch_manager.prefix_table import PartialMatch
from inflight.batch_manager.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached blocks, or the prompt of a running sibling."""

    num_tokens: int
    block_ids: list[int]
    """Cached blocks; empty if there is a source."""
    source: Sequence | None = None
    """The sibling, which holds the tokens once the steps launched so far and the one being scheduled are done."""
    partial: PartialMatch | None = None
    """A cached block whose first tokens follow those of `block_ids`: they are copied. `num_tokens` counts them too."""
    has_arrived: bool = False
    """What follows `block_ids` came from other ranks: it is copied into blocks of its own."""

    @property
    def in_full_blocks(self) -> Prefix:
        """The same without what would have to be copied from a cached block."""
        if self.partial is None:
            return self
        return Prefix(self.num_tokens - self.partial.num_tokens, self.block_ids)
