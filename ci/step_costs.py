"""What each kind of step launches and copies on a GPU, and the table in which these numbers are kept.

`python -m ci.step_costs --write` writes the table, and `ci/unit/gpu/test_steps.py` fails where a step costs more than
the table says, and where it costs less, until the table is written again. Without the option the numbers are shown.

Steps run on the fake device of `ci/helpers/fake_cuda`, with two layers of the size of an 8B Llama, and three rows. With
another version of torch than the table's, its operations are not compared: they may be composed in another way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from fake_cuda.context import fake_cuda
from fake_cuda.device import FakeDevice
from fake_cuda.engine import FakeEngine
from fake_cuda.modes import MODES, steps_of, steps_of_blocks, steps_of_draft_model
from fake_cuda.networks import FAMILIES, LLAMA_8B, QWEN3_30B_A3B, WHOLE_ONLY, FakeRanks
from fake_cuda.trace import COLLECTIVE, OPERATION
from fp8_checkpoints import BLOCK_QUANTIZATION, QUANTIZATION

from inflight.scheduler_output import SchedulerOutput
from inflight_kernels.matmul.gpu.linear import CANDIDATES
from inflight_kernels.tuning import trying

TABLE = Path(__file__).parent / "unit" / "gpu" / "step_costs.json"
REMEDY = "run python -m ci.step_costs --write"
NUM_RANKS = (1, 2)

Counts = dict[str, int]
Steps = Iterator[tuple[str, SchedulerOutput]]


def measure(num_ranks: int) -> dict[str, Counts]:
    """By "what | step | ranks"."""
    rows: dict[str, Counts] = {}
    for what, steps, options in _cases(num_ranks):
        found = _run(steps, options, num_ranks)
        rows |= {f"{what} | {step} | ranks {num_ranks}": counts for step, counts in found.items()}
    return rows


def _cases(num_ranks: int) -> Iterator[tuple[str, Callable[[], Steps], dict[str, Any]]]:
    for name, mode in MODES.items():
        yield name, partial(steps_of, mode), {"with_options": name in ("adapter", "post-processor")}
    yield "draft model", partial(steps_of_draft_model, MODES["filters"]), {"with_draft_model": True}
    # The addresses of all caches are sent to the device when the first block is copied, which is before any request.
    yield "moved blocks", steps_of_blocks, {"with_options": True, "warms_up": True}
    yield "deterministic", partial(steps_of, MODES["greedy"]), {"deterministic": True}
    yield "fp8 cache", partial(steps_of, MODES["filters"]), {"kv_dtype": torch.float8_e4m3fn}
    yield "own linears", _with_own_linears, {}
    fp8 = {"values": {**LLAMA_8B, "quantization_config": QUANTIZATION}}
    yield "fp8 weights", partial(steps_of, MODES["greedy"]), fp8
    yield "fp8 weights, adapters", partial(steps_of, MODES["adapter"]), {**fp8, "with_options": True}
    blocks = {"values": {**LLAMA_8B, "quantization_config": BLOCK_QUANTIZATION}}
    yield "fp8 weights by blocks", partial(steps_of, MODES["greedy"]), blocks
    experts = {"values": {**QWEN3_30B_A3B, "quantization_config": BLOCK_QUANTIZATION}}
    yield "fp8 experts by blocks", partial(steps_of, MODES["greedy"]), experts
    for name, values in FAMILIES.items():
        if num_ranks > 1 and name in WHOLE_ONLY:
            continue
        yield f"family {name}", partial(steps_of, MODES["greedy"]), {"values": values}


def _with_own_linears() -> Steps:
    """As on a device whose table says that the kernels multiply."""
    with trying("linear", CANDIDATES[2]), trying("gated_linear", CANDIDATES[2]):
        yield from steps_of(MODES["greedy"])


def _run(steps: Callable[[], Steps], options: dict[str, Any], num_ranks: int) -> dict[str, Counts]:
    """What the leader does. The other rank must do as much, and exchange the same, or they would wait forever."""
    ranks = FakeRanks()
    of_ranks = []
    for rank in range(num_ranks):
        with fake_cuda() as device, tempfile.TemporaryDirectory() as folder:
            at = {} if num_ranks == 1 else {"rank": rank, "ranks": ranks}
            of_ranks.append(_run_rank(device, FakeEngine(device, Path(folder), **at, **options), steps()))
    leader, *others = of_ranks
    for other in others:
        exchanged = [{step: counts[COLLECTIVE] for step, counts in each.items()} for each in (leader, other)]
        assert exchanged[0] == exchanged[1], exchanged
    return leader


def _run_rank(device: FakeDevice, engine: FakeEngine, steps: Steps) -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    for name, scheduled in steps:
        trace, output = engine.step(scheduled)
        assert not output.errors and not output.refused, output
        found[name] = trace.counts()
    return found


def kept_rows(num_ranks: int) -> dict[str, Counts]:
    """Of the table."""
    steps: dict[str, Counts] = json.loads(TABLE.read_text())["steps"]
    return {key: row for key, row in steps.items() if key.endswith(f"ranks {num_ranks}")}


def _torch_version() -> str:
    return str(torch.__version__).partition("+")[0]


def faults(found: dict[str, Counts], num_ranks: int) -> list[str]:
    """Sentences on what does not agree with the kept table."""
    kept = kept_rows(num_ranks)
    same_torch = json.loads(TABLE.read_text())["torch"] == _torch_version()
    sentences = [f"{key} is kept, but is no step: {REMEDY}" for key in kept.keys() - found.keys()]
    for key, counts in found.items():
        if key not in kept:
            sentences.append(f"{key} is not in the kept table: {REMEDY}")
            continue
        for kind, number in counts.items():
            before = kept[key][kind]
            if number > before and (kind != OPERATION or same_torch):
                sentences.append(f"{key} rose from {before} to {number} of {kind}")
            if number < before and (kind != OPERATION or same_torch):
                sentences.append(f"{key} fell from {before} to {number} of {kind}: {REMEDY}")
    return sentences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    rows = {key: counts for num_ranks in NUM_RANKS for key, counts in measure(num_ranks).items()}
    if arguments.write:
        body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(counts)}" for key, counts in rows.items())
        TABLE.write_text(f'{{\n "torch": "{_torch_version()}",\n "steps": {{\n{body}\n }}\n}}\n')
    for key, counts in rows.items():
        print(f"{key:50}" + "  ".join(f"{kind} {number:>4}" for kind, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
