"""How a stub unloads its own model when the ranks could not be relaunched, so that the supervisor loads it again.

tritonserver 2.51 does not ask a Python model whether it is ready, so a model that cannot serve must unload itself. That
helps only if somebody loads it again: the stub first leaves a note for the supervisor in the run directory. Without a
supervisor nothing is unloaded, and the executor relaunches its ranks under the loaded model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.run_directory import UNLOADED, run_directory


def is_supervised() -> bool:
    """Whether a supervisor would load an unloaded model again."""
    return _notes() is not None


def unload_itself(pb_utils: Any, model_name: str, reason: str) -> None:
    """Leave the note and unload the model. Raises OSError, or the exception with which tritonserver refuses it."""
    notes = _notes()
    assert notes is not None
    draft = notes.with_name(f"{UNLOADED}-{model_name}")
    draft.write_text(reason + "\n", encoding="utf-8")
    draft.replace(notes / model_name)
    pb_utils.unload_model(model_name)


def _notes() -> Path | None:
    directory = run_directory()
    return directory / UNLOADED if directory is not None and (directory / UNLOADED).is_dir() else None
