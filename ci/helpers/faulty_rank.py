"""The program of a real rank whose device fails in a step, as a GPU would.

INFLIGHT_FAULTS=FILE    each rank takes the first line of it, WHERE,STEP: in the step of this number "launch" and "wait"
                        raise what CUDA raises, then and ever after; "memory" raises once that there is none
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from inflight.config import EngineConfig
from inflight.distributed.rank_group import RankGroup
from inflight.executor.rank.worker import main
from inflight.runtime.model_runner import ModelRunner
from inflight.scheduler_output import SchedulerOutput, StepOutput

FAULTS = "INFLIGHT_FAULTS"
MESSAGE = "CUDA error: an illegal memory access was encountered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
"""As torch has it, in several lines."""


class FaultyRunner(ModelRunner):
    fault = ""
    num_good_steps = 0
    """Still to come."""

    def forward(self, scheduled: SchedulerOutput) -> Any:
        self.num_good_steps -= 1
        if self.fault == "launch":
            self._fail()
        if self.fault == "memory" and self.num_good_steps == -1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(scheduled)

    def collect(self, handle: Any) -> StepOutput:
        if self.fault == "wait":
            self._fail()
        return super().collect(handle)

    def _fail(self) -> None:
        if self.num_good_steps < 0:
            raise torch.AcceleratorError(MESSAGE)


def load(config: EngineConfig, group: RankGroup) -> FaultyRunner:
    runner = FaultyRunner.load(config, group)
    faults = Path(os.environ[FAULTS])
    mine, *others = [*faults.read_text().split(), ""]
    faults.write_text("\n".join(others))
    if mine:
        runner.fault, _, step = mine.partition(",")
        runner.num_good_steps = int(step)
    return runner


if __name__ == "__main__":
    sys.exit(main(load))
