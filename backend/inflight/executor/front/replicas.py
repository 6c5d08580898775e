"""The replicas of a front's engine: the state of each, what they serve together, and which one gets a request.

Where some are for prompts (`context_replicas`), the others generate. While none of a kind serves, the others do its
work: every replica can do all of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from msgspec import structs

from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.executor.front.engine_state import EngineState, overall
from inflight.executor.front.phase import Phase
from inflight.executor.front.routing import Placement, Router
from inflight.request import Request
from inflight.request_limits import RequestLimits

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replica:
    state: EngineState = EngineState.STARTING
    limits: RequestLimits | None = None
    """Those of its last ranks, if there are none now."""
    max_in_flight: int = 0
    """Requests that its leader takes from all fronts together; 0 = no limit."""

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY


class Replicas:
    """Takes no lock. A replica is its number."""

    def __init__(self, num_replicas: int, config: EngineConfig) -> None:
        """`config`: of which what the prefix cache shares is used, and how many replicas are for prompts."""
        self._num_for_contexts = config.context_replicas
        self._replicas = [_Replica() for _ in range(num_replicas)]
        # Which device auto finds, ranks know alone: by their block size a prefix may count a part of a block less.
        block_size = config.for_device(config.device).tokens_per_block
        self._router = Router(num_replicas, block_size if config.enable_kv_cache_reuse else 0)
        self.state = EngineState.STARTING
        """Of the engine."""
        self.limits: RequestLimits | None = None
        """Bounds on requests that every replica can serve, so that each can go on with another one's; None before one
        was ready."""
        self.description = EngineDescription(device="")
        self.max_in_flight = 0
        """Requests that those which serve take together, or all if none serves; 0 = no limit."""

    def __len__(self) -> int:
        return len(self._replicas)

    # -- states --------------------------------------------------------------------------------------------------------

    def states(self) -> list[EngineState]:
        return [replica.state for replica in self._replicas]

    def ready(self) -> list[int]:
        """The replicas that serve."""
        return [number for number, replica in enumerate(self._replicas) if replica.is_ready]

    def note_ready(
        self, replica: int, limits: RequestLimits, description: EngineDescription, max_in_flight: int
    ) -> None:
        """Its ranks serve; if they did not before, they are new ones."""
        known = self._replicas[replica]
        if not known.is_ready:
            self._router.expect(replica, limits.kv_cache_tokens)
        known.limits, known.max_in_flight = limits, max_in_flight
        if self.description.layers and (changes := description.changes(self.description)):
            logger.warning("the ranks compute with %s: requests that go on with them may get other tokens", changes)
        self.description = description
        self.note_state(replica, EngineState.READY)

    def note_state(self, replica: int, state: EngineState) -> None:
        self._replicas[replica].state = state
        self.state = overall(self.states())
        self.limits, self.max_in_flight = self._common_limits(), self._total_in_flight()

    def _common_limits(self) -> RequestLimits | None:
        known = [replica.limits for replica in self._replicas if replica.limits is not None]
        if len(known) < 2:
            return known[0] if known else None
        return structs.replace(
            known[0],
            # Only what depends on the memory that was free can differ.
            kv_cache_tokens=min(limits.kv_cache_tokens for limits in known),
            num_adapter_slots=min(limits.num_adapter_slots for limits in known),
        )

    def _total_in_flight(self) -> int:
        serving = [replica for replica in self._replicas if replica.is_ready] or self._replicas
        bounds = [replica.max_in_flight for replica in serving]
        return sum(bounds) if all(bounds) else 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def prefix(self, request: Request) -> list[bytes]:
        """What `choose` and `place` need to know of a request's prompt. May be called by any thread."""
        return self._router.prefix(request)

    def choose(
        self, num_tokens: int, prefix: list[bytes], only: int | None = None, phase: Phase = Phase.WHOLE
    ) -> int | None:
        """The replica that gets a request of so many tokens; None = it waits for ranks, `only` those of one if given.
        One that has as many requests of this front as its leader takes is left out while there are others."""
        ready = self.ready()
        if only is not None:
            return only if only in ready else None
        ready = [number for number in ready if self._is_for_contexts(number) == (phase is Phase.CONTEXT)] or ready
        free = [number for number in ready if not self._is_full(number)]
        return self._router.choose(num_tokens, prefix, free or ready) if ready else None

    def phase_at(self, replica: int, phase: Phase) -> Phase:
        """Of a request in `phase` that goes to this replica: the context phase alone has a place only where another
        replica can go on."""
        if phase is not Phase.CONTEXT:
            return phase
        is_apart = self._is_for_contexts(replica) and not all(map(self._is_for_contexts, self.ready()))
        return Phase.CONTEXT if is_apart else Phase.WHOLE

    def _is_for_contexts(self, replica: int) -> bool:
        return replica < self._num_for_contexts

    def _is_full(self, replica: int) -> bool:
        return 0 < self._replicas[replica].max_in_flight <= self._router.num_requests(replica)

    def place(self, num_tokens: int, prefix: list[bytes], replica: int) -> Placement:
        """Count a request of so many tokens among those of `replica`, to which it is sent."""
        return self._router.place(num_tokens, prefix, replica)
