"""How a stub unloads its own model when the ranks are gone, so that the supervisor loads it again.

tritonserver 2.51 cannot ask a Python model whether it is ready, so the model must unload itself. It first writes a note
into the supervisor's private directory, which tells the supervisor to load the model again. Without a supervisor
nothing is unloaded, and the executor relaunches its ranks under the loaded model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.run_directory import LOST, run_directory


def is_supervised() -> bool:
    """Whether a supervisor would load a lost model again."""
    return _notes() is not None


def give_up(pb_utils: Any, model_name: str, reason: str) -> None:
    """Write the note and unload the model. Raises OSError, or pb_utils' exception if the server refuses."""
    notes = _notes()
    assert notes is not None
    draft = notes.with_name(f"{LOST}-{model_name}")
    draft.write_text(reason + "\n", encoding="utf-8")
    draft.replace(notes / model_name)
    pb_utils.unload_model(model_name)


def _notes() -> Path | None:
    directory = run_directory()
    return directory / LOST if directory is not None and (directory / LOST).is_dir() else None
