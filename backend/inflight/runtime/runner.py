"""The interface between the worker loop and one device: what GptManager calls to run the network.

`ModelRunner` is the real implementation; tests have one with predictable tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

from inflight.scheduler_output import SchedulerOutput, StepOutput


class Runner(Protocol):
    """Runs steps in the order in which they are started; the host goes on while the device computes.

    A step is started in two halves. The first needs only tokens that are on the device already. How the next tokens may
    be sampled can depend on tokens of the step before that the host must see first (a grammar's mask, a logits
    processor, a beam's choice). Where it does not, `sample` follows `forward` at once.
    """

    def forward(self, scheduled: SchedulerOutput) -> Any:
        """Start a step's network and return the step's handle at once, without waiting for the device.

        A token that a row sampled in the step before is passed to this one on the device. An exception means that
        nothing was started; it is a ValueError if the runner does not support what the step asks for. An exception of
        the step itself is raised by `collect`.
        """

    def sample(self, handle: Any) -> dict[int, list[int]]:
        """Start the second half, which samples the tokens. Once for each step, before the next step's `forward`.

        Returns row -> tokens that it most likely samples in this step and the next ones, because its grammar leaves the
        text no choice: they may be drafts. Only where that was not known before.
        """

    def collect(self, handle: Any) -> StepOutput:
        """Wait for the step and return its tokens. Handles must be collected in the order of their steps."""

    def survives(self, error: Exception) -> bool:
        """Whether further steps can run after an exception that one of these three has raised. If not, the rank must
        end: whatever runs on its device would fail."""

    def memory_usage(self) -> tuple[int, int, int]:
        """Bytes in use: (host, device, pinned)."""

    def close(self) -> None:
        """Wait for all started steps and free the device."""
