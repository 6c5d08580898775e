"""Builds the C++ ahead for a wheel, so that whoever serves from it needs no compiler.

    python -m inflight_kernels.cpu.prebuilt FOLDER VARIANTS

VARIANTS are all of this machine's architecture, none, here (the best one of this machine), or names with commas
between; each in every type, and with the collectives. What the cache has is not compiled again.

A library asks for glibc 2.14 (of aarch64 2.17), the libstdc++ of gcc 5 and the libgomp.so.1 of gcc 6. torch asks for
newer ones, or brings them: the loader finds the libgomp.so.1 of torch under that name, because torch has loaded it, so
the threads are torch's. torch 2.9 gives its own another name: beside it the system's must be there, as gcc 6 and newer
have it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from inflight_kernels.cpu.library import (
    LibraryUnavailable,
    append_digest,
    compiled_file,
    prebuilt_name,
    program_options,
)
from inflight_kernels.cpu.variants import DTYPES, VARIANTS, variants_here


class Source(NamedTuple):
    """What is compiled, and how."""

    name: str
    options: tuple[str, ...]
    shown: str


def sources(variants: str) -> list[Source]:
    """Of a wheel for them. Raises ValueError for a word that names none."""
    known = {each.name: each for each in VARIANTS}
    here = [each.name for each in variants_here()[:1]]
    words = {"all": list(known), "none": [], "here": here}.get(variants, variants.split(","))
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"VARIANTS are all, none, here, or some of {', '.join(known)}; got {', '.join(unknown)!r}")
    found = []
    for variant in map(known.__getitem__, words):
        for dtype in DTYPES:
            shown = f"{variant}, {str(dtype).removeprefix('torch.')}"
            found.append(Source("program", program_options(variant, dtype), shown))
        found.append(Source("collectives", variant.options, f"{variant}, collectives"))
    return found


def build(source: Source, folder: Path) -> Path:
    """The library in `folder`, without the names that only debuggers read. Raises LibraryUnavailable and OSError."""
    built = folder / prebuilt_name(source.name, source.options)
    command = ["strip", "-o", str(built), str(compiled_file(source.name, source.options))]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise LibraryUnavailable(f"strip failed: {finished.stderr.strip()}")
    append_digest(built)
    return built


def main(folder: Path, variants: str) -> None:
    started, num_bytes = time.monotonic(), 0
    wanted = sources(variants)
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
        building = {compilers.submit(build, source, folder): source for source in wanted}
        for number, built in enumerate(as_completed(building), 1):
            shown = building[built].shown
            try:
                size = built.result().stat().st_size
            except (LibraryUnavailable, OSError) as error:
                compilers.shutdown(cancel_futures=True)
                remedy = "VARIANTS=none builds a wheel that compiles at the first start"
                sys.exit(f"The library for {shown} cannot be built ahead: {error}; {remedy}")
            num_bytes += size
            seconds = time.monotonic() - started
            print(f"[{number}/{len(wanted)}] {shown}: {size / 1e3:.0f} KB, after {seconds:.0f} s", flush=True)
    print(f"{len(wanted)} libraries, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except ValueError as error:
        sys.exit(str(error))
