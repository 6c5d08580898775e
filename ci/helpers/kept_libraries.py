"""C++ libraries that are compiled once for all tests, in caches that a test has for itself.

A library's name is a digest of all that it is made of, and it ends with a digest of itself, so a copy is as good as one
that is compiled again.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from inflight_kernels.cpu import LibraryUnavailable, Variant, library, variants_here

BEST = tuple((variant, torch.bfloat16) for variant in variants_here()[:1])
"""What networks take that nothing is forced for."""


def copy_libraries(cache: Path, programs: Iterable[tuple[Variant, torch.dtype]] = BEST) -> None:
    """Into the folder `cache`, which INFLIGHT_CACHE_DIR will name, `programs` and the collectives from the cache that
    it names now, which gets what it lacks. Nothing that was measured of them. Without a compiler there are none."""
    wanted = [("program", library.program_options(*each)) for each in programs]
    wanted += [("collectives", each.options) for each in variants_here()[:1]]
    (cache / "cpu").mkdir(mode=0o700, parents=True)
    with contextlib.suppress(LibraryUnavailable):
        for name, options in wanted:
            kept = library.compiled_file(name, options)
            shutil.copyfile(kept, cache / "cpu" / kept.name)
