"""All that can happen to a server, one file for each family of faults. A fault is data: what is done, and what is
promised to the streams then."""

from __future__ import annotations

from ci.chaos.faults.clients import CLIENTS
from ci.chaos.faults.disk import DISK
from ci.chaos.faults.fault import Fault
from ci.chaos.faults.memory import MEMORY
from ci.chaos.faults.network import NETWORK
from ci.chaos.faults.processes import PROCESSES

FAULTS: tuple[Fault, ...] = (*PROCESSES, *NETWORK, *MEMORY, *DISK, *CLIENTS)

NEVER: dict[str, str] = {
    "the clock jumps": "processes under libfaketime share a semaphore, which one that is killed keeps for ever",
    "the network between ranks loses messages": "ranks of one machine meet in shared memory",
}
"""What is not injected on any machine, and why."""

__all__ = ["FAULTS", "NEVER", "Fault"]
