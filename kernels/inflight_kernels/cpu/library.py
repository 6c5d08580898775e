"""The C++ of `native/`, compiled for a set of instructions that this machine has, and loaded. It is compiled once and
kept on disk, unless a wheel has brought it.

The cache is one private folder of files named after all that went into them (sources, options, compiler), so that a
file is either right or not found; each ends with a digest of itself, so that one that is damaged is made anew and never
loaded. Beside it lie what the compiler said of it, and which instructions are fastest here. A wheel's libraries
(prebuilt.py) lie beside this module, where nothing is ever written, and are named after sources and options alone: they
serve machines without a compiler.
Knows what the functions take, not what they are for.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from ctypes import CDLL, c_bool, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from inflight_kernels.cache_folder import cache_folder
from inflight_kernels.cpu.instructions import (
    VARIABLE,
    Instruction,
    Instructions,
    Order,
    are_right,
    choose,
    forced_instruction,
)
from inflight_kernels.cpu.structures import layout
from inflight_kernels.cpu.variants import (
    AMX,
    AVX512_BF16,
    DTYPES,
    VARIANTS,
    Variant,
    forced_variant,
    processor_flags,
    processor_name,
    variants_here,
)

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "native"
_PREBUILT = Path(__file__).parent / "libraries"
"""Of a wheel; a source checkout has no such folder."""
LANGUAGE = ("-ffp-contract=off", "-std=c++17", "-fopenmp")
"""What decides of results, among the compiler's options."""
# gcc 12 finds its own intrinsics to be uninitialized.
_WARNINGS = ("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
_OPTIONS = ("-O3", *LANGUAGE, "-fPIC", "-shared", "-fvisibility=hidden", *_WARNINGS)
"""Hidden: tables inside inline functions would be those of the library that was loaded first, for all that come after
it, and so would be the instructions that they point at."""
_ELEMENTS = {torch.float32: "float", torch.float16: "F16", torch.bfloat16: "Bf16"}
"""How formats.h calls them."""
_DIGEST_BYTES = 16
NO_BFLOAT16 = "this processor has no AVX-512 for bfloat16"
_Functions = dict[str, tuple[Any, list[Any]]]
"""Name: what it gives, what it takes."""
_PROGRAM: _Functions = {
    "inflight_request_tiles": (c_bool, []),
    "inflight_layout": (c_int64, [c_int64]),
    "inflight_area_bytes": (c_int64, []),
    "inflight_workspace_bytes": (c_int64, [c_void_p, c_void_p]),
    "inflight_run": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "inflight_linear": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
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
    dtype: torch.dtype
    """Of activations and plain weights."""
    variant: Variant
    instructions: Instructions

    @property
    def sum_order(self) -> str:
        """In which it adds up products of bfloat16, fma or amx; empty for other types."""
        return self.instructions.order.value if self.dtype == torch.bfloat16 else ""


class LibraryUnavailable(Exception):
    """It can be neither compiled nor loaded; the message says why."""


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it. Without them torch widens bfloat16 and float16 to float32 for
    each product."""
    return AVX512_BF16.needs <= processor_flags()


def unsupported_reason() -> str:
    """Why this machine cannot have the library, as half a sentence; empty if it can."""
    if not VARIANTS:
        return f"there are no layers in C++ for {platform.machine()}"
    if not variants_here():
        return f"this processor has no {', '.join(sorted(VARIANTS[-1].needs - processor_flags()))}"
    if _find_compiler():
        return ""
    prebuilt = [
        _prebuilt_file("program", program_options(variant, dtype)) for variant in variants_here() for dtype in DTYPES
    ]
    return "" if any(map(_is_whole, prebuilt)) else f"{_why_not_prebuilt(*prebuilt)}, and {_why_no_compiler()}"


def load_library(
    dtype: torch.dtype = torch.bfloat16, instruction: Instruction | None = None, order: Order = Order.AUTO
) -> NativeLibrary:
    """The library for `dtype`, from the wheel, from the cache or compiled now (a few seconds): of the variant that the
    environment names, else of the best one here that the wheel has or the compiler knows. Call it once torch is loaded:
    its threads are those of the libgomp.so.1 that torch has brought. `instruction`: the one that multiplies bfloat16;
    else what the environment names, else what is fastest in `order`.

    Raises LibraryUnavailable.
    """
    if dtype not in DTYPES:
        raise LibraryUnavailable(f"there are no layers in C++ for {dtype}")
    try:
        forced, chosen = forced_variant(), instruction or forced_instruction()
        candidates = [forced] if forced else variants_here()
        if chosen and dtype == torch.bfloat16:
            candidates = [each for each in candidates if chosen.needs <= each.needs]
            if not candidates:
                raise LibraryUnavailable(f"there is no {chosen.value} here; unset {VARIABLE}")
        return _load_best(dtype, candidates, chosen, order)
    except OSError as error:
        raise LibraryUnavailable(f"the C++ layers cannot be kept or loaded: {error}") from error
    except ValueError as error:
        raise LibraryUnavailable(str(error)) from error


def load_collectives() -> CDLL:
    """The collectives of one machine's ranks, likewise; any processor will do. Raises LibraryUnavailable."""
    try:
        best = variants_here()[:1]
        return _load("collectives", _COLLECTIVES, best[0].options if best else ())[0]
    except OSError as error:
        raise LibraryUnavailable(f"the C++ collectives cannot be kept or loaded: {error}") from error


def _load_best(
    dtype: torch.dtype, candidates: Sequence[Variant], chosen: Instruction | None, order: Order
) -> NativeLibrary:
    """Of the first candidate that can be compiled, whose tiles the system keeps for this process, and whose products
    are right."""
    unavailable = LibraryUnavailable("this processor has no variant of the C++ layers")
    for variant in candidates:
        try:
            functions, path = _load("program", _PROGRAM, program_options(variant, dtype))
        except LibraryUnavailable as error:
            # An older compiler does not know the newest instructions.
            unavailable = error
            continue
        _compare_layouts(functions)
        if variant is AMX and not functions.inflight_request_tiles():
            unavailable = LibraryUnavailable(f"there is no AMX here for this process; unset {VARIABLE}")
            continue
        instructions = _instructions(dtype, variant, chosen, order, functions, path)
        if are_right(functions, dtype, instructions):
            return NativeLibrary(functions, dtype, variant, instructions)
        logger.warning("this processor does not multiply rightly by %s: a lower variant is tried", variant.name)
        unavailable = LibraryUnavailable(f"this processor does not multiply rightly by {variant.name}")
    raise unavailable


def _instructions(
    dtype: torch.dtype, variant: Variant, chosen: Instruction | None, order: Order, functions: CDLL, path: Path
) -> Instructions:
    if dtype != torch.bfloat16:
        return Instructions.only(Instruction.FMA)
    if chosen:
        return Instructions.only(chosen)
    if variant is AMX and order is not Order.FMA:
        return Instructions.with_tiles()
    if order is Order.AMX:
        return Instructions.only(Instruction.FMA_AS_AMX)
    if not Instruction.VDPBF16PS.needs <= variant.needs:
        return Instructions.only(Instruction.FMA)
    return choose(functions, path.with_suffix(f".{_digest(processor_name().encode()).hex()}.json"))


def _load(name: str, functions: _Functions, options: Sequence[str]) -> tuple[CDLL, Path]:
    """What is made of `name`.cpp, and beside which path in the cache lies what is measured of it."""
    prebuilt = _prebuilt_file(name, options)
    if _is_whole(prebuilt):
        library, path = CDLL(str(prebuilt)), _in_cache(prebuilt)
    else:
        if prebuilt.exists():
            _warn_of(prebuilt)
        if not _find_compiler():
            raise LibraryUnavailable(f"{_why_not_prebuilt(prebuilt)}, and {_why_no_compiler()}")
        path = compiled_file(name, options)
        library = CDLL(str(path))
    for each, (result, arguments) in functions.items():
        function = getattr(library, each)
        function.restype, function.argtypes = result, arguments
    return library, path


def compiled_file(name: str, options: Sequence[str]) -> Path:
    """Where the cache has what is made of `name`.cpp, which is compiled now unless it is there. Raises OSError and
    LibraryUnavailable."""
    compiler = _find_compiler()
    if not compiler:
        raise LibraryUnavailable(_why_no_compiler())
    path = cache_folder("cpu") / f"{name}-{_key(compiler, options)}.so"
    if not _is_whole(path):
        with _log_of_compiler(path) as log:
            if not _is_whole(path):
                _compile(name, compiler, options, path, log)
    return path


@contextlib.contextmanager
def _log_of_compiler(path: Path) -> Iterator[TextIO]:
    """For one process at a time: ranks start together, and those that wait need not compile the same. A process that
    ends lets others go on. Where the file system has no locks each compiles, and whoever is last replaces an equal
    file."""
    with path.with_suffix(".log").open("a", encoding="utf-8") as log:
        with contextlib.suppress(OSError):
            fcntl.flock(log, fcntl.LOCK_EX)
        yield log


def program_options(variant: Variant, dtype: torch.dtype) -> tuple[str, ...]:
    """The compiler's, for program.cpp."""
    return (*variant.options, f"-DINFLIGHT_ELEMENT={_ELEMENTS[dtype]}")


def prebuilt_name(name: str, options: Sequence[str]) -> str:
    """Of the file in a wheel. Neither compiler nor torch is part of it: whoever has the wheel may have no compiler, and
    of torch only the libgomp.so.1 matters, which any from gcc 6 on can be."""
    return f"{name}-{_digest_of_sources(*_OPTIONS, *options)}.so"


def _prebuilt_file(name: str, options: Sequence[str]) -> Path:
    return _PREBUILT / prebuilt_name(name, options)


def _why_not_prebuilt(*files: Path) -> str:
    """Half a sentence."""
    damaged = [str(path) for path in files if path.exists()]
    return f"{damaged[0]} is damaged" if damaged else "no library was built ahead for this processor"


@functools.cache
def _warn_of(prebuilt: Path) -> None:
    """Once in each process."""
    logger.warning("%s is damaged and is not loaded; install the wheel anew", prebuilt)


def _in_cache(prebuilt: Path) -> Path:
    """Its place there if it were compiled here; one that nobody can write to where there is no cache."""
    try:
        return cache_folder("cpu") / prebuilt.name
    except OSError as error:
        logger.info("what is measured of this processor cannot be kept: %s", error)
        return Path(os.devnull, prebuilt.name)


def _compare_layouts(functions: CDLL) -> None:
    """Raises LibraryUnavailable if the library's structures are not those of operations.py."""
    for index, (what, number) in enumerate({**layout(), "their end": -1}.items()):
        if functions.inflight_layout(index) != number:
            raise LibraryUnavailable(f"the C++ layers have other structures than Python, from {what} on")


def _is_whole(path: Path) -> bool:
    """Whether the library is there, as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])


def _compile(name: str, compiler: Sequence[str], options: Sequence[str], path: Path, log: TextIO) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch, path.name)
        command = [*compiler, *_OPTIONS, *options, str(_SOURCES / f"{name}.cpp"), "-o", str(built)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        log.truncate(0)
        log.write(finished.stderr)
        if finished.returncode:
            errors = [line for line in finished.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else finished.stderr.strip()[:200] or f"it ended with {finished.returncode}"
            raise LibraryUnavailable(f"{' '.join(compiler)} failed: {reason}")
        append_digest(built)
        os.replace(built, path)


def append_digest(library: Path) -> None:
    """By which it is known to be whole. Whoever loads a library does not look behind its last section."""
    digest = _digest(library.read_bytes())
    with open(library, "ab") as whole:
        whole.write(digest)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _find_compiler() -> list[str]:
    """$CXX with its options, else g++; empty if there is none. clang++ is not looked for: it brings an OpenMP of its
    own, whose threads fight torch's for the cores."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    return command if command and shutil.which(command[0]) else []


def _why_no_compiler() -> str:
    named = os.environ.get("CXX")
    return f"CXX names no program: {named}" if named else "no C++ compiler was found; install g++"


def _key(compiler: Sequence[str], options: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return _digest_of_sources(version, *compiler, *_OPTIONS, *options, torch.__version__)


def _digest_of_sources(*made_with: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in made_with:
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.rglob("*.*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
