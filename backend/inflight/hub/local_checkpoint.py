"""A MODEL that somebody names, on a command line, in config.pbtxt or in a program, as a path of this machine.

The one way in. To be called by the process that starts ranks, before it does: ranks, stubs and other fronts are given
the folder.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.gguf.folder import with_folders
from inflight.hub.client import Hub
from inflight.hub.fetch import fetch
from inflight.hub.model_name import ModelName, find_name
from inflight.python_command import find_python, worker_environment

logger = logging.getLogger(__name__)

KEY = "gpt_model_path"
CHECK = ("-m", "inflight.models.servable")
CHECK_SECONDS = 120.0
"""The check imports torch and transformers; after this time the ranks are left to say what is wrong."""


def local_checkpoint(
    model: str | os.PathLike[str],
    parameters: Mapping[str, str] | None = None,
    *,
    folder: str | Path = ".",
    tell: Callable[[str], None] = logger.info,
) -> Path:
    """The checkpoint's folder, or its GGUF file: `model` itself if it is a path, else what was fetched of the model
    with this name.

    `parameters`: the engine's, which decide what it can serve. `folder`: where relative paths start. `tell` is given
    lines for people. Raises ConfigurationError.
    """
    name = find_name(os.fspath(model), folder)
    return Path(model) if name is None else fetch_model(name, parameters or {}, tell)


def fetch_model(name: ModelName, parameters: Mapping[str, str], tell: Callable[[str], None] = logger.info) -> Path:
    """As `local_checkpoint`, of what is known to be a name."""
    return fetch(name, Hub.of_environment(), lambda folder: check_config(folder, parameters), tell)


def with_local_checkpoint(parameters: Mapping[str, str], folder: str | Path) -> dict[str, str]:
    """The parameters of a config.pbtxt whose version folder is `folder`, with folders for models that are named, and
    for GGUF files. Raises ConfigurationError."""
    name = find_name(parameters.get(KEY, "").strip(), folder)
    if name is None:
        return with_folders(parameters, folder)
    if parameters.get("executor", "").strip() == "external":
        raise ConfigurationError(refusal(KEY, name))
    return with_folders({**parameters, KEY: str(fetch_model(name, parameters))}, folder)


def refusal(key: str, name: ModelName) -> str:
    """Where somebody else than the engine's own front starts the ranks, and for other checkpoints than its own."""
    return f"{key}: {name} is not a folder, and is not fetched by its name here: {name.by_hand}"


def check_config(folder: Path, parameters: Mapping[str, str]) -> None:
    """Raise ConfigurationError if the config.json in `folder` shows that the engine cannot serve the checkpoint. In a
    process of its own, since it takes torch."""
    command = [str(find_python()), *CHECK]
    told = json.dumps({**parameters, KEY: str(folder)})
    try:
        done = subprocess.run(
            command,
            input=told,
            env=worker_environment(os.environ),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
    if done.returncode and done.stdout.strip():
        raise ConfigurationError(done.stdout.strip())
