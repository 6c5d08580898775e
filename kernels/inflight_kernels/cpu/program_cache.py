"""Compile a torch function once per machine: export it, let inductor build a library ahead of time, keep it on disk.

Knows no operation: whoever calls it names the function, its example inputs and which of their sizes vary. The cache is
one private folder of files named after all that went into them (the function's source, shapes, torch, the CPU), so that
a file is either right or not found.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Program = Callable[[list[Any]], list[Tensor]]
"""Takes the flat inputs (it empties the list), gives the flat outputs. About 10 microseconds of host time a call."""


def find_compiler() -> str | None:
    """The C++ compiler that inductor would use, or None: $CXX, then g++, then clang++."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


def cache_folder() -> Path:
    """$INFLIGHT_CACHE_DIR, else $XDG_CACHE_HOME/inflight, else ~/.cache/inflight; made private to its user."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("INFLIGHT_CACHE_DIR") or Path(base, "inflight"), "cpu")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def load_program(
    name: str, module: torch.nn.Module, inputs: Sequence[Any], dynamic_shapes: Sequence[Any], *, sources: Sequence[Path]
) -> Program:
    """The compiled `module`, from the cache or built now (seconds).

    `inputs` are examples, one for each argument of its forward; `dynamic_shapes` names, for each of them, the
    sizes that vary ({dimension: torch.export.Dim}) or None. `sources` are the files whose text decides what is
    computed.
    """
    path = cache_folder() / f"{name}-{_key(name, module, inputs, dynamic_shapes, sources)}.pt2"
    if not path.exists():
        _build(module, inputs, dynamic_shapes, path)
    program: Program = torch._inductor.aoti_load_package(str(path)).loader.boxed_run
    return program


def _build(module: torch.nn.Module, inputs: Sequence[Any], dynamic_shapes: Sequence[Any], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, torch.no_grad():
        exported = torch.export.export(module, tuple(inputs), dynamic_shapes=tuple(dynamic_shapes))
        built = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=os.path.join(scratch, "program.pt2"),
            # Block tables come from our own scheduler: a bounds check in every inner loop costs a third of attention.
            inductor_configs={"assert_indirect_indexing": False, "cpp.enable_floating_point_contract_flag": "fast"},
        )
        # Ranks may build the same program at once: whoever is last replaces an equal file.
        os.replace(built, path)


def _key(
    name: str, module: torch.nn.Module, inputs: Sequence[Any], dynamic_shapes: Sequence[Any], sources: Sequence[Path]
) -> str:
    shapes = [(tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else value for value in inputs]
    digest = hashlib.blake2b(digest_size=12)
    for part in (name, repr(module), shapes, dynamic_shapes, torch.__version__, torch.get_num_threads(), _cpu()):
        digest.update(repr(part).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _cpu() -> str:
    """What the compiler sees of the processor: the same model and flags run the same instructions."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
