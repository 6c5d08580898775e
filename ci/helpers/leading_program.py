"""A program that `mpiexec` starts as rank 0 of a job, and that leads it as tritonserver would, with fake ranks.

    leading_program.py BATCH_SIZE …    serves one launch with each of these max_batch_size, one after the other
    leading_program.py kill            serves, and kills rank 1

Prints what the ranks said of themselves, as one line of JSON for each launch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import fake_outer_rank
from calls import Caller

from inflight.config import EngineConfig
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.mpi_leader import MpiLeader

SIZE = 2


def main(words: list[str]) -> None:
    if words == ["kill"]:
        front = _start(4)
        os.kill(front.engine_pids()[-1], signal.SIGKILL)
        time.sleep(600)  # until mpiexec ends this process
    for word in words:
        front = _start(int(word))
        caller = Caller(front)
        caller.serve(*(caller.request([n, n + 1], 1 + n) for n in range(12)))
        pids = front.engine_pids()
        front.shutdown()
        print(json.dumps({"max_batch_size": front.limits.max_batch_size, "pids": pids}), flush=True)


def _start(max_batch_size: int) -> RemoteFront:
    config = EngineConfig(tensor_parallel_size=SIZE, max_batch_size=max_batch_size, max_num_tokens=64)
    front = RemoteFront(config, MpiLeader(config, program=[str(Path(fake_outer_rank.__file__))]))
    front.start()
    return front


if __name__ == "__main__":
    main(sys.argv[1:])
