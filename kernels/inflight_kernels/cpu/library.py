"""The C++ of `native/`, compiled for this machine and loaded; compiled once, then kept on disk.

The cache is one private folder of files named after all that went into them (sources, flags, compiler, processor), so
that a file is either right or not found; beside a library lies which instructions are fastest. Knows what the functions
take, not what they are for.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import CDLL, c_bool, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inflight_kernels.cache_folder import cache_folder
from inflight_kernels.cpu.instructions import VARIABLE, Instruction, Instructions, choose, forced_instruction
from inflight_kernels.cpu.operations import layout

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
_NEEDED_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"})
NO_BFLOAT16 = "this processor has no AVX-512 for bfloat16"
_Functions = dict[str, tuple[Any, list[Any]]]
"""Name: what it gives, what it takes."""
_PROGRAM: _Functions = {
    "inflight_request_tiles": (c_bool, []),
    "inflight_layout": (c_int64, [c_int64]),
    "inflight_area_bytes": (c_int64, []),
    "inflight_workspace_bytes": (c_int64, [c_void_p, c_void_p]),
    "inflight_run": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "inflight_linear": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "inflight_packed_size": (c_int64, [c_int64, c_int64]),
    "inflight_pack": (None, [c_void_p, c_int64, c_int64, c_bool, c_int64, c_void_p]),
}
"""program.cpp says what each of them is."""
_COLLECTIVES: _Functions = {
    "inflight_segment_bytes": (c_int64, [c_int64]),
    "inflight_sum_float32": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "inflight_sum_bfloat16": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "inflight_gather": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
}
"""Of collectives.cpp."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    functions: CDLL
    """They let other Python threads run meanwhile."""
    instructions: Instructions


class LibraryUnavailable(Exception):
    """It can be neither compiled nor loaded; the message says why."""


def multiplies_bfloat16() -> bool:
    """Whether this processor has the instructions for it that the library is made of. Without them torch widens
    bfloat16 and float16 to float32 for each product."""
    return _processor_flags().issuperset(_NEEDED_FLAGS)


def unsupported_reason() -> str:
    """Why this machine cannot have the library, as half a sentence; empty if it can."""
    if not multiplies_bfloat16():
        return NO_BFLOAT16
    if not _find_compiler():
        named = os.environ.get("CXX")
        return f"CXX names no program: {named}" if named else "no C++ compiler was found; install g++"
    return ""


def load_library(instruction: Instruction | None = None) -> NativeLibrary:
    """The library, from the cache or compiled now (a few seconds). Call it once torch is loaded: its threads are those
    of the libgomp.so.1 that torch has brought. `instruction`: the one that multiplies; else what the environment names,
    else what is fastest.

    Raises LibraryUnavailable.
    """
    try:
        forced = instruction or forced_instruction()
        functions, path = _load("program", _PROGRAM)
        _compare_layouts(functions)
        # Tiles are a state that the system may refuse to keep for a process.
        has_tiles = functions.inflight_request_tiles()
        if forced is Instruction.AMX and not has_tiles:
            raise LibraryUnavailable(f"there is no AMX here for this process; unset {VARIABLE}")
        if forced:
            return NativeLibrary(functions, Instructions.only(forced))
        if has_tiles:
            return NativeLibrary(functions, Instructions.with_tiles())
        return NativeLibrary(functions, choose(functions, path.with_suffix(".json")))
    except OSError as error:
        raise LibraryUnavailable(f"the C++ layers cannot be kept or loaded: {error}") from error
    except ValueError as error:
        raise LibraryUnavailable(str(error)) from error


def load_collectives() -> CDLL:
    """The collectives of one machine's ranks, likewise; any processor will do. Raises LibraryUnavailable."""
    try:
        return _load("collectives", _COLLECTIVES)[0]
    except OSError as error:
        raise LibraryUnavailable(f"the C++ collectives cannot be kept or loaded: {error}") from error


def _load(name: str, functions: _Functions) -> tuple[CDLL, Path]:
    """What is made of `name`.cpp, and where it lies."""
    compiler = _find_compiler()
    if not compiler:
        raise LibraryUnavailable("no C++ compiler was found")
    path = cache_folder("cpu") / f"{name}-{_key(compiler)}.so"
    if not path.exists():
        _compile(name, compiler, path)
    try:
        library = CDLL(str(path))
    except OSError:
        # What lies there is broken; what is made now is not, or the error stands.
        _compile(name, compiler, path)
        library = CDLL(str(path))
    for each, (result, arguments) in functions.items():
        function = getattr(library, each)
        function.restype, function.argtypes = result, arguments
    return library, path


def _compare_layouts(functions: CDLL) -> None:
    """Raises LibraryUnavailable if the library's structures are not those of operations.py."""
    for index, (what, number) in enumerate({**layout(), "their end": -1}.items()):
        if functions.inflight_layout(index) != number:
            raise LibraryUnavailable(f"the C++ layers have other structures than Python, from {what} on")


def _compile(name: str, compiler: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch, path.name)
        command = [*compiler, *_FLAGS, str(_SOURCES / f"{name}.cpp"), "-o", str(built)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            errors = [line for line in finished.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else finished.stderr.strip()[:200] or f"it ended with {finished.returncode}"
            raise LibraryUnavailable(f"{' '.join(compiler)} failed: {reason}")
        with open(built, "rb") as whole:
            # A file of that name must never be part of one, not even after the power went.
            os.fsync(whole.fileno())
        # Ranks may build the same library at once: whoever is last replaces an equal file.
        os.replace(built, path)


def _find_compiler() -> list[str]:
    """$CXX with its options, else g++; empty if there is none. clang++ is not looked for: it brings an OpenMP of its
    own, whose threads fight torch's for the cores."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    return command if command and shutil.which(command[0]) else []


def _key(compiler: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.blake2b(digest_size=12)
    for part in (version, *compiler, *_FLAGS, *sorted(_processor_flags()), torch.__version__):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _processor_flags() -> frozenset[str]:
    """What the compiler sees of the processor: the same flags run the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = [line.partition(":")[2] for line in lines if line.startswith(("model name", "flags"))]
    return frozenset(" ".join(named[:2]).split())
