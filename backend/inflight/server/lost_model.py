"""How a stub gives its model up when the ranks are gone, so that the supervisor loads it again.

tritonserver 2.51 cannot ask a Python model whether it is ready: the model must unload itself. That is only good where
somebody loads it again, so a note in the supervisor's private directory comes first; without a supervisor nothing is
unloaded, and the executor relaunches its ranks under the loaded model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.run_directory import LOST, run_directory


def is_supervised() -> bool:
    """Whether somebody would load a lost model again."""
    return _notes() is not None


def give_up(pb_utils: Any, model_name: str, reason: str) -> None:
    """Leave the note and unload the model. Raises OSError, or what the server refuses with."""
    notes = _notes()
    assert notes is not None
    draft = notes.with_name(f"{LOST}-{model_name}")
    draft.write_text(reason + "\n", encoding="utf-8")
    draft.replace(notes / model_name)
    pb_utils.unload_model(model_name)


def _notes() -> Path | None:
    directory = run_directory()
    return directory / LOST if directory is not None and (directory / LOST).is_dir() else None
