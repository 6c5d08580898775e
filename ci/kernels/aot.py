"""Compile every kernel ahead of time, without a GPU, just as the launchers would launch it in serving.

Each case calls a launcher with meta tensors of a serving shape while launches are recorded instead of run; every
recorded launch is compiled for each architecture and its registers, shared memory and spills are read from the
assembler. Says nothing about speed or results.

    python ci/kernels/aot.py                  compile, print the table, compare it with the kept one
    python ci/kernels/aot.py --write          compile, print the table, keep it
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from aot_cases import CASES, NEEDS
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from inflight_kernels.ops import _checks

TABLE = Path(__file__).with_name("aot_table.json")
ARCHITECTURES = (80, 90, 100)
# What a threadblock may hold, by architecture (CUDA C++ Programming Guide, technical specifications), in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Registers may drift a little with the assembler's patch release; more than this is a regression.
REGISTER_SLACK = 8
POINTER_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages")


class Launch(NamedTuple):
    """One recorded launch: the kernel, its signature by parameter, its constants, divisible arguments and options."""

    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[int, ...]
    options: dict[str, int]


def record(case: Callable[[], None], architecture: int) -> list[Launch]:
    """The launches that `case` makes on an architecture, with arguments specialised as triton does at run time."""
    launches: list[Launch] = []

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible: list[int] = []
        for place, parameter in enumerate(kernel.params):
            name, value = parameter.name, values[parameter.name]
            if isinstance(value, Tensor):
                signature[name] = POINTER_TYPES[value.dtype]
                # torch allocates on 512-byte borders; views at odd offsets are rarer than what this stands for.
                divisible.append(place)
            elif parameter.is_constexpr or value is None or value == 1:
                signature[name] = "constexpr"
                constants[name] = value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0:
                    divisible.append(place)
        launches.append(Launch(kernel, signature, constants, tuple(divisible), options))

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(_checks, "DEFAULT_CAPABILITY", architecture):
        case()
    return launches


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled, as the assembler reports them."""
    tools = Path(nvidia.__file__).parent / "bin"
    # Triton assembles for Blackwell with an assembler of its own.
    blackwell = tools / "ptxas-blackwell"
    ptxas = blackwell if architecture >= 100 and blackwell.exists() else tools / "ptxas"
    suffix = "a" if architecture >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name=sm_{architecture}{suffix}", source, "-o", Path(folder, "kernel.o")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return registers, spills


def compile_case(name: str, architecture: int) -> dict[str, dict[str, int]]:
    """Resources of each kernel of a case, by "case | kernel | sm_NN"."""
    rows: dict[str, dict[str, int]] = {}
    for launch in record(CASES[name], architecture):
        source = ASTSource(
            fn=launch.kernel,
            signature=launch.signature,
            constexprs=launch.constants,
            attrs={(place,): [["tt.divisibility", 16]] for place in launch.divisible},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
        registers, spills = _assemble(compiled.asm["ptx"], architecture)
        rows[f"{name} | {launch.kernel.__name__} | sm_{architecture}"] = {
            "registers": registers,
            "shared": compiled.metadata.shared,
            "spills": spills,
        }
    return rows


def compile_all(jobs: int) -> dict[str, dict[str, int]]:
    """The whole table."""
    work = [
        (name, architecture) for architecture in ARCHITECTURES for name in CASES if architecture >= NEEDS.get(name, 0)
    ]
    with ProcessPoolExecutor(jobs) as pool:
        parts = pool.map(compile_case, *zip(*work, strict=True))
    return {key: row for part in parts for key, row in part.items()}


def find_faults(table: dict[str, dict[str, int]], kept: dict[str, Any]) -> list[str]:
    """Sentences about spills, shared memory over the limit, and regressions against a table of the same triton."""
    faults = []
    for key, row in table.items():
        limit = SHARED_LIMIT[int(key.rpartition("sm_")[2])]
        if row["spills"]:
            faults.append(f"{key} spills {row['spills']} bytes")
        if row["shared"] > limit:
            faults.append(f"{key} needs {row['shared']} bytes of shared memory, there are {limit}")
        before = kept["kernels"].get(key)
        if kept["triton"] != triton.__version__:
            continue
        if before is None:
            faults.append(f"{key} is not in the kept table: run python ci/kernels/aot.py --write")
        elif row["registers"] > before["registers"] + REGISTER_SLACK:
            faults.append(f"{key} went from {before['registers']} to {row['registers']} registers")
        elif row["shared"] > before["shared"]:
            faults.append(f"{key} went from {before['shared']} to {row['shared']} bytes of shared memory")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep the table instead of comparing with the kept one")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    arguments = parser.parse_args()
    table = compile_all(arguments.jobs)
    print(f"{'kernel':<78}{'registers':>10}{'shared':>9}{'spills':>8}")
    for key, row in table.items():
        print(f"{key:<78}{row['registers']:>10}{row['shared']:>9}{row['spills']:>8}")
    kept = {"triton": triton.__version__, "kernels": table}
    if not arguments.write:
        kept = json.loads(TABLE.read_text())
    faults = find_faults(table, kept)
    for fault in faults:
        print(fault, file=sys.stderr)
    if arguments.write and not faults:
        TABLE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
