"""tritonserver's config.pbtxt of a model, and the engine's configuration in one. Knows no repository and no process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

CONFIG = "config.pbtxt"


def parse(text: str, origin: Path) -> ModelConfig:
    """Read one config.pbtxt; `origin` is named in the error. Raises ConfigurationError."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigurationError(f"{origin} cannot be read: line {error}") from None


def read_engine_config(path: Path, overrides: Mapping[str, str]) -> tuple[str, EngineConfig]:
    """The name and the engine's configuration of the model whose config.pbtxt, or folder, is `path`.

    `overrides`: parameters in place of the file's. Relative paths start, as in tritonserver, at the newest version
    folder, and become full ones. Raises ConfigurationError.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    config = parse(text, file)
    values = {key: parameter.string_value for key, parameter in config.parameters.items()} | dict(overrides)
    folder = file.parent.resolve()
    return config.name or folder.name, EngineConfig.from_parameters(values, newest_version(folder))


def newest_version(folder: Path) -> Path:
    """The version folder of a model that tritonserver loads. Raises ConfigurationError if there is none."""
    versions = [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()]
    if not versions:
        raise ConfigurationError(f"{folder} has no version folder (1, 2, …)")
    return folder / str(max(versions))
