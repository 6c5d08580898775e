"""Environments and converted models of peers, made once and kept in `build/peers`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ci.bench.local_packages import LOCAL
from ci.bench.peers.peer import WORKERS, Contender, Peer

MODELS = LOCAL / "models"
HELPERS = Path(__file__).resolve().parents[2] / "helpers"
RECIPE = "recipe.json"
"""In an environment that is whole: what it was made of."""


class Unavailable(Exception):
    """Why a peer cannot be measured here, in a sentence."""


def python_of(peer: Peer, minutes: float) -> Path:
    """Its environment's python, after installation where the recipe is new. Raises Unavailable; the log says more."""
    if not peer.requirements:
        return Path(sys.executable)
    folder = LOCAL / peer.name
    python, recipe = folder / "bin" / "python", folder / RECIPE
    wanted = json.dumps({"requirements": peer.requirements, "unwanted": peer.unwanted, "build": dict(peer.build)})
    if recipe.exists() and recipe.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{peer.name} is installed into {folder}", flush=True)
    log = LOCAL / f"{peer.name}.log"
    _run([sys.executable, "-m", "venv", str(folder)], log, minutes)
    # pip would keep what it builds, and give it to a peer that wants the same version built otherwise.
    pip = [str(python), "-m", "pip", *(["--no-cache-dir"] if peer.build else [])]
    _run([*pip, "install", *peer.requirements], log, minutes, dict(peer.build))
    if peer.unwanted:
        _run([*pip, "uninstall", "--yes", *peer.unwanted], log, minutes)
    recipe.write_text(wanted)
    return python


def model_of(contender: Contender, python: Path, checkpoint: Path, minutes: float) -> Path:
    """What its worker loads, converted where it is missing or older than the checkpoint. Raises Unavailable."""
    convert = contender.peer.convert
    if not convert:
        return checkpoint
    target = MODELS / checkpoint.name / f"{convert.removesuffix('_convert.py')}-{contender.format}"
    if target.exists() and target.stat().st_mtime > (checkpoint / "config.json").stat().st_mtime:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    for old in (part, target):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    source = gguf_of(checkpoint) if contender.peer.converts_gguf else checkpoint
    command = [str(python), str(WORKERS / convert), str(source), str(part), contender.format]
    _run(command, target.with_name(f"{target.name}.log"), minutes)
    part.rename(target)
    return target


def gguf_of(checkpoint: Path) -> Path:
    """A file of its weights in bfloat16, without a vocabulary, because prompts are token ids."""
    path = MODELS / checkpoint.name / "bf16.gguf"
    if not path.exists() or path.stat().st_mtime <= (checkpoint / "config.json").stat().st_mtime:
        sys.path.insert(0, str(HELPERS))
        from gguf_files import BF16, write_file

        part = path.with_suffix(".part")
        write_file(part, checkpoint, BF16)
        part.rename(path)
    return path


def _run(command: list[str], log: Path, minutes: float, environment: dict[str, str] | None = None) -> None:
    """With little claim to the processor. Raises Unavailable."""
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (environment or {})
    with log.open("w") as output:
        try:
            subprocess.run(
                ["nice", "-n", "15", *command],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=minutes * 60,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"it took longer than {minutes:g} minutes, see {log}") from None
        except subprocess.CalledProcessError:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise Unavailable(f"{lines[-1] if lines else 'no word of why'}, see {log}") from None
