"""The device's rates, on which the predictions and most goals rest."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ci.bench.gpu.figure import Figure
from ci.bench.gpu.part import Given
from ci.bench.rates import Rates

RATES = "rates.json"
CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
"""Of the GPU while it computes."""


def measure_rates(given: Given) -> Iterator[Figure]:
    """Nothing in the dry run: a CPU has none of these rates, and parts are told the assumed ones without a file."""
    if given.is_dry:
        return
    import torch

    from ci.bench.kernels import machine

    device = torch.device("cuda")
    rates = machine.measure_rates(device)
    gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    order = {"rates": asdict(rates), "gpu_bytes": gpu_bytes}
    Path(given.folder, RATES).write_text(json.dumps(order), encoding="utf-8")
    yield given.figure("copy", rates.copy / 1e12)
    yield given.figure("read", rates.read / 1e12)
    yield given.figure("bf16 product", rates.bf16 / 1e12)
    yield given.figure("fp8 product", rates.fp8 / 1e12)
    yield given.figure("one kernel more in a graph", rates.launch_us)
    yield given.figure("replay of a graph of one kernel", rates.replay_us)


def clocks_now(given: Given) -> str:
    """Of a device that computes: a slow one may be a hot one. Empty without a GPU or its tool."""
    tool = shutil.which("nvidia-smi")
    if given.is_dry or tool is None:
        return ""
    command = [tool, f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def read_rates(folder: Path) -> tuple[Rates, float] | None:
    """Rates and bytes of memory, if they were measured."""
    path = folder / RATES
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Rates(**values["rates"]), values["gpu_bytes"]
