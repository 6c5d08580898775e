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
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from inflight_kernels import ops
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


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(hidden_size: int, with_residual: bool) -> None:
    x = _bf16(64, hidden_size)
    ops.rms_norm(x, _bf16(hidden_size), 1e-5, x if with_residual else None)


def _activation() -> None:
    ops.silu_and_mul(_bf16(64, 2 * 14336))


def _rope(num_q_heads: int, num_kv_heads: int, head_dim: int, with_norm: bool) -> None:
    tokens = 64
    q, k, v = _bf16(tokens, num_q_heads + 2 * num_kv_heads, head_dim).split(
        [num_q_heads, num_kv_heads, num_kv_heads], 1
    )
    cache = _bf16(1024, 64, num_kv_heads, head_dim)
    index = _of(torch.int64, tokens)
    norms = (_bf16(head_dim), _bf16(head_dim)) if with_norm else ()
    ops.rope_and_kv_write(q, k, v, _of(torch.float32, 8192, head_dim), index, cache, cache, index, *norms)


def _decode(batch: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int = 0) -> None:
    cache = _bf16(1024, block_size, num_kv_heads, head_dim)
    table = _of(torch.int32, batch, 8192 // block_size)
    q = _bf16(batch, num_q_heads, head_dim)
    ops.decode_attention(q, cache, cache, table, _of(torch.int32, batch), 0.1, window)


def _prefill(
    max_query_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int = 0
) -> None:
    cache = _bf16(1024, block_size, num_kv_heads, head_dim)
    table = _of(torch.int32, 4, 8192 // block_size)
    q = _bf16(4 * max_query_len, num_q_heads, head_dim)
    starts, lengths = _of(torch.int32, 5), _of(torch.int32, 4)
    ops.prefill_attention(q, cache, cache, table, starts, lengths, max_query_len, 0.1, window)


def _sample(vocab_size: int, everything: bool) -> None:
    batch = 64
    row = _of(torch.float32, batch)
    count, index = _of(torch.int32, batch), _of(torch.int64, batch)
    extras: tuple[Tensor, ...] = ()
    if everything:
        shape = (batch, vocab_size)
        masks = _of(torch.bool, *shape)
        extras = (row, row, row, masks, _of(torch.int32, *shape), _of(torch.float32, *shape), masks)
    flags = dict.fromkeys(("any_top_k", "any_top_p", "any_min_p"), everything)
    ops.sample(_bf16(batch, vocab_size), row, count, row, row, index, index, *extras, **flags)


CASES: dict[str, Callable[[], None]] = {
    "norm h4096": lambda: _norm(4096, False),
    "add+norm h4096": lambda: _norm(4096, True),
    "add+norm h576": lambda: _norm(576, True),
    "silu_and_mul i14336": _activation,
    "rope 32/8 d128": lambda: _rope(32, 8, 128, False),
    "rope+qk-norm 32/8 d128": lambda: _rope(32, 8, 128, True),
    "rope 9/3 d64": lambda: _rope(9, 3, 64, False),
    "decode b4 32/8 d128 block64": lambda: _decode(4, 32, 8, 128, 64),
    "decode b256 32/8 d128 block16": lambda: _decode(256, 32, 8, 128, 16),
    "decode b4 9/3 d64 block64": lambda: _decode(4, 9, 3, 64, 64),
    "decode b4 32/8 d128 block64 window": lambda: _decode(4, 32, 8, 128, 64, 4096),
    "prefill 32/8 d128 block64": lambda: _prefill(2048, 32, 8, 128, 64),
    "prefill 32/8 d128 block16": lambda: _prefill(2048, 32, 8, 128, 16),
    "prefill 9/3 d64 block64": lambda: _prefill(2048, 9, 3, 64, 64),
    "prefill short 32/8 d128 block64": lambda: _prefill(8, 32, 8, 128, 64),
    "prefill 32/8 d128 block64 window": lambda: _prefill(2048, 32, 8, 128, 64, 4096),
    "sample v128256 plain": lambda: _sample(128256, False),
    "sample v128256 everything": lambda: _sample(128256, True),
}


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
            elif parameter.is_constexpr or value == 1:
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
    work = [(name, architecture) for architecture in ARCHITECTURES for name in CASES]
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
