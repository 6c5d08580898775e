"""The seam between the loop and one device: what GptManager needs of whatever runs the network.

`ModelRunner` implements it for real; tests implement it with predictable tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

from inflight.scheduler_output import SchedulerOutput, StepOutput


class Runner(Protocol):
    """Runs steps in the order they are launched. A step is two halves so that the host works while the device does."""

    def launch(self, scheduled: SchedulerOutput) -> Any:
        """Start a step and return its handle at once, without waiting for the device.

        The token that a row sampled in the step before feeds this one on the device. Raises only if nothing was
        started; an exception of the step itself is raised by `collect`.
        """

    def collect(self, handle: Any) -> StepOutput:
        """Wait for the step and bring its tokens to the host. Handles are collected in launch order."""

    def memory_usage(self) -> tuple[int, int, int]:
        """Bytes in use: (host, device, pinned)."""

    def close(self) -> None:
        """Finish what was launched and free the device."""
