"""Engines whose weights become codes that a folder keeps; also in processes of their own."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest
from quantized_runs import run
from tiny_checkpoints import make_prompt

from inflight.models.formats import code_cache

PROMPTS = [make_prompt(length) for length in (1, 21)]
Results = list[tuple[list[int], list[float]]]


def keep_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """All codes, however few they are."""
    folder.mkdir(exist_ok=True)
    patch.setattr(code_cache, "cache_folder", lambda name: folder)
    patch.setattr(code_cache, "LEAST_BYTES", 0)


def results(folder: Path, quantization: str = "int4") -> Results:
    """Tokens and log probabilities."""
    works = run(folder, PROMPTS, quantization=quantization, cpu_compile="true", dtype="float32")
    return [(work.output, work.output_log_probs) for work in works]


def results_together(barrier: Barrier, folder: Path, kept: Path) -> Results:
    """Of an engine that is loaded when others are."""
    with pytest.MonkeyPatch.context() as patch:
        keep_in(kept, patch)
        barrier.wait()
        return results(folder)
