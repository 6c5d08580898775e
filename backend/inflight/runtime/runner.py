"""The seam between the loop and one device: what GptManager needs of whatever runs the network.

`ModelRunner` implements it for real; tests implement it with predictable tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

from inflight.scheduler_output import SchedulerOutput, StepOutput


class Runner(Protocol):
    """Runs steps in the order in which they are started; the host works on while the device computes.

    A step is started in two halves. The tokens that it feeds to the network are on the device already; how the next
    ones may be picked can depend on what the host learns from the step before (a grammar's mask, a processor of logits,
    a beam's choice). Where nothing does, `sample` follows `forward` at once.
    """

    def forward(self, scheduled: SchedulerOutput) -> Any:
        """Start a step's network and return the step's handle at once, without waiting for the device.

        The token that a row sampled in the step before feeds this one on the device. Raises only if nothing was
        started, ValueError where the step asks for what the runner does not serve; an exception of the step itself is
        raised by `collect`.
        """

    def sample(self, handle: Any) -> None:
        """Start the second half: pick the tokens. Once for each step, before the next step's `forward`."""

    def collect(self, handle: Any) -> StepOutput:
        """Wait for the step and bring its tokens to the host. Handles are collected in the order of their steps."""

    def memory_usage(self) -> tuple[int, int, int]:
        """Bytes in use: (host, device, pinned)."""

    def close(self) -> None:
        """Finish what was started and free the device."""
