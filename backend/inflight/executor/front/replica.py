"""What a front knows of one replica of its engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from msgspec import structs

from inflight.engine_description import EngineDescription
from inflight.executor.front.engine_state import EngineState
from inflight.request_limits import RequestLimits


@dataclass(slots=True)
class Replica:
    """Limits and description are those of its last ranks, if there are none now."""

    state: EngineState = EngineState.STARTING
    limits: RequestLimits | None = None
    description: EngineDescription | None = None
    max_in_flight: int = 0
    """Requests that its leader takes from all fronts together; 0 = no limit."""

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY


def common_limits(replicas: Collection[Replica]) -> RequestLimits | None:
    """Bounds on requests that each of them can serve, so that any can go on with another one's; None if nothing is
    known of any. Only what depends on the memory that was free can differ."""
    known = [replica.limits for replica in replicas if replica.limits is not None]
    if not known:
        return None
    return structs.replace(
        known[-1],
        kv_cache_tokens=min(limits.kv_cache_tokens for limits in known),
        num_adapter_slots=min(limits.num_adapter_slots for limits in known),
    )


def total_in_flight(replicas: Collection[Replica]) -> int:
    """Requests that those which serve take together, or all if none serves; 0 = no limit."""
    serving = [replica for replica in replicas if replica.is_ready] or replicas
    bounds = [replica.max_in_flight for replica in serving]
    return sum(bounds) if all(bounds) else 0
