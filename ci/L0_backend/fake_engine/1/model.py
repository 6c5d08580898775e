"""The backend's own model.py over a rank without a network (ci/helpers/fake_rank.py): loads in half a second."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

from inflight.executor.launchers import uniproc

ROOT = Path(__file__).resolve().parents[4]

uniproc.UniProc = partial(uniproc.UniProc, (str(ROOT / "ci" / "helpers" / "fake_rank.py"),))

_spec = importlib.util.spec_from_file_location("backend_model", ROOT / "backend" / "model.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

TritonPythonModel = _module.TritonPythonModel
