"""Writes the model repository that is served: the operator's, with some of the engine's parameters replaced.

Each config.pbtxt that changes is copied; versions, checkpoints and everything else are links. Knows tritonserver's
model configuration and the engine's parameter names; starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.gguf.folder import find_file, with_folders
from inflight.hub.local_checkpoint import KEY, fetch_model, refusal
from inflight.hub.model_name import ModelName, find_name
from inflight.model_config import CONFIG, newest_version, parse
from inflight.supervisor import checkpoint
from inflight.supervisor.apis import ApiModel

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

Fetch = Callable[[ModelName, Mapping[str, str]], Path]
"""A model of the hub and the engine's parameters -> the folder with its files, or its GGUF file."""

BACKEND = "inflight"
ENGINE = "engine"
"""Parameter of a model of our backend that has no engine of its own: the name of the model whose engine it uses."""


@dataclass(frozen=True, kw_only=True)
class ServedRepository:
    """A repository written for one server."""

    path: Path
    models: tuple[str, ...]
    """The models that are loaded at the start, in this order: engines before models that may call them."""
    attached: dict[str, str]
    """Dialect models and the ensembles with such a step, which are loaded after these, and the engine of each."""
    engine: str
    """The model of our backend, which got the parameters and the checkpoint; if there is none, the first model."""
    answering: tuple[str, ...]
    """Engines with the inputs input_ids and max_tokens, to which the canary can send a request."""
    config: EngineConfig | None
    """The engine's checked configuration; None if no model is of our backend."""
    configs: dict[str, EngineConfig] = field(default_factory=dict)
    """Those of several models' engines, by name; empty if there is one."""
    fetched: dict[str, str] = field(default_factory=dict)
    """Name of a model on the hub -> the folder, or the GGUF file, that is served in its place."""

    def attached_to(self, engine: str) -> tuple[str, ...]:
        """The dialect models of an engine."""
        return tuple(name for name, owner in self.attached.items() if owner == engine)


def write(
    source: Path,
    target: Path,
    *,
    checkpoint_folder: Path | ModelName | None = None,
    parameters: Mapping[str, str] | None = None,
    api_models: Mapping[str, ApiModel] | None = None,
    fetch: Fetch = fetch_model,
) -> ServedRepository:
    """Write the repository to serve into the new folder `target`.

    `checkpoint_folder` and `parameters` are set in the only engine. `api_models`: dialect models to add, by name.
    `fetch`: gives the path of a model that is named instead of one. Raises ConfigurationError for an invalid
    repository, config.pbtxt, parameter or checkpoint.
    """
    overrides = dict(parameters or {})
    if checkpoint_folder is not None:
        overrides = of_checkpoint(checkpoint_folder, overrides)
    configs = read(source)
    ours = [name for name, config in configs.items() if config.backend == BACKEND]
    attached = {name: engine for name in ours if (engine := _parameter(configs[name], ENGINE))}
    engines = [name for name in ours if name not in attached]
    if (overrides or api_models) and len(engines) != 1:
        raise ConfigurationError(
            f"{source} has {len(engines)} models of backend {BACKEND}; it needs exactly one to take these options"
        )
    for name, owner in attached.items():
        if owner not in engines:
            raise ConfigurationError(f"model {name} names the {ENGINE} {owner}, which {source} does not have")
    target.mkdir(parents=True)
    fetched: dict[str, str] = {}
    for name, config in configs.items():
        changes = with_files(config, overrides, source / name, fetch, fetched) if name in engines else {}
        write_model(source / name, target / name, config, changes)
    engine = engines[0] if engines else next(iter(configs))
    for name, model in (api_models or {}).items():
        if name in configs:
            raise ConfigurationError(f"--api {model.api}: {source} has a model {name} already")
        write_bare_model(model.folder, target / name, {ENGINE: engine}, is_unary=model.is_unary)
        attached[name] = engine
    attached |= _ensembles_of(configs, attached)
    return ServedRepository(
        path=target,
        models=(*engines, *(name for name in configs if name not in (*ours, *attached))),
        attached=attached,
        engine=engine,
        answering=tuple(name for name in engines if takes_token_ids(configs[name])),
        config=checked(configs[engine], source / engine) if engines else None,
        fetched=fetched,
    )


def of_checkpoint(folder: Path | ModelName, parameters: Mapping[str, str]) -> dict[str, str]:
    """The parameters of an engine that serves this checkpoint. Raises ConfigurationError if there is no such folder."""
    if isinstance(folder, Path):
        if find_file(folder) is None:
            checkpoint.check_folder(folder)  # as it was given
            folder = folder.resolve()
        folder = Path(os.path.abspath(folder))
    # The dtype in the repository, and the adapters, are for its own checkpoint.
    return {"dtype": "auto", "max_loras": "", "lora_dir": "", **parameters, "gpt_model_path": str(folder)}


def with_files(
    config: ModelConfig, parameters: Mapping[str, str], folder: Path, fetch: Fetch, fetched: dict[str, str]
) -> dict[str, str]:
    """An engine's parameters with the folders of what they name: of a model on the hub, which is noted in `fetched`,
    and of GGUF files. `folder`: the model's in the repository. Raises ConfigurationError."""
    changes = dict(parameters)
    if (named := _named_model(config, changes, folder)) is not None:
        fetched[str(named)] = fetched.get(str(named)) or str(fetch(named, {**_parameters(config), **changes}))
        changes[KEY] = fetched[str(named)]
    return changes | _folders_of_files(config, changes, folder)


def anywhere(config: EngineConfig) -> dict[str, str]:
    """The parameters of an engine, with full paths, for a process that starts in another folder."""
    parameters = config.to_parameters()
    for key in ("gpt_model_path", "tokenizer_dir", "speculative_model_dir", "lora_dir"):
        if parameters[key]:
            parameters[key] = str(Path(parameters[key]).resolve())
    return parameters


def read(source: Path) -> dict[str, ModelConfig]:
    """The configuration of every model in a repository, by name."""
    if not source.is_dir():
        raise ConfigurationError(f"{source} is not a folder: give a model repository")
    folders = sorted(folder for folder in source.iterdir() if (folder / CONFIG).is_file())
    if not folders:
        raise ConfigurationError(f"{source} is not a model repository: no folder in it has a {CONFIG}")
    return {folder.name: parse((folder / CONFIG).read_text(encoding="utf-8"), folder / CONFIG) for folder in folders}


def replace_parameters(config: ModelConfig, values: Mapping[str, str]) -> None:
    """Set these parameters of the configuration; the others keep their values."""
    for key, value in values.items():
        config.parameters[key].string_value = value


def write_bare_model(source: Path, target: Path, parameters: Mapping[str, str], *, is_unary: bool = False) -> None:
    """Write a model with the configuration of `source`, these parameters, and an empty version folder. `is_unary`: and
    not decoupled."""
    from google.protobuf import text_format

    config = parse((source / CONFIG).read_text(encoding="utf-8"), source / CONFIG)
    replace_parameters(config, parameters)
    if is_unary:
        config.model_transaction_policy.decoupled = False
    (target / "1").mkdir(parents=True)
    (target / CONFIG).write_text(text_format.MessageToString(config, as_utf8=True), encoding="utf-8")


def write_model(source: Path, target: Path, config: ModelConfig, overrides: Mapping[str, str]) -> None:
    """Write a model of the repository `source`, with these parameters, into the new folder `target`."""
    if not overrides:
        target.symlink_to(source.resolve())
        return
    from google.protobuf import text_format

    target.mkdir()
    for entry in source.iterdir():
        if entry.name != CONFIG:
            (target / entry.name).symlink_to(entry.resolve())
    replace_parameters(config, overrides)
    (target / CONFIG).write_text(text_format.MessageToString(config, as_utf8=True), encoding="utf-8")


def _ensembles_of(configs: Mapping[str, ModelConfig], attached: Mapping[str, str]) -> dict[str, str]:
    """tritonserver's ensembles with a step that is attached to an engine or is such an ensemble, and each one's engine.
    Loaded earlier, they would ask for a model whose engine does not serve yet."""
    found: dict[str, str] = {}
    for _ in configs:  # each pass finds those of the next depth
        known = {**attached, **found}
        for name, config in configs.items():
            owners = [known[step.model_name] for step in config.ensemble_scheduling.step if step.model_name in known]
            if owners:
                found.setdefault(name, owners[0])
    return found


def _named_model(config: ModelConfig, changes: Mapping[str, str], folder: Path) -> ModelName | None:
    """What an engine's model is to be fetched from the hub, if it is named instead of a folder. Raises
    ConfigurationError if somebody else starts the ranks, who read the config.pbtxt as it is."""
    values = {**_parameters(config), **changes}
    name = find_name(values.get(KEY, "").strip(), newest_version(folder))
    if name is not None and values.get("executor", "").strip() == "external":
        raise ConfigurationError(refusal(KEY, name))
    return name


def _folders_of_files(config: ModelConfig, changes: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Parameters that name GGUF files, with the folders that are made of these. Raises ConfigurationError."""
    values = {**_parameters(config), **changes}
    made = with_folders(values, newest_version(folder))
    return {key: value for key, value in made.items() if value != values[key]}


def _parameters(config: ModelConfig) -> dict[str, str]:
    return {key: parameter.string_value for key, parameter in config.parameters.items()}


def _parameter(config: ModelConfig, key: str) -> str:
    """Its value; "" if it is not set. (To ask the map for a missing key would add it.)"""
    return str(config.parameters[key].string_value) if key in config.parameters else ""


def takes_token_ids(config: ModelConfig) -> bool:
    """Whether the canary can ask it."""
    return {"input_ids", "max_tokens"} <= {tensor.name for tensor in config.input}


def checked(config: ModelConfig, folder: Path) -> EngineConfig:
    """Read the parameters as the backend will, so that a wrong one is reported before anything starts."""
    engine = EngineConfig.from_parameters(_parameters(config), newest_version(folder))
    for key in ("moe_expert_parallel_size", "pipeline_parallel_size"):
        if engine.model_impl == "transformers" and getattr(engine, key) > 1:
            raise ConfigurationError(f"{key} is for native layers: set it to 1, or model_impl to auto")
    if engine.lora_dir and not Path(engine.lora_dir).is_dir():
        raise ConfigurationError(
            f"lora_dir: {engine.lora_dir} is not a folder; set it to the one that holds the adapters"
        )
    checkpoint.check(
        Path(engine.gpt_model_path),
        tokenizer=Path(engine.tokenizer_dir),
        tensor_parallel_size=engine.tensor_parallel_size,
        moe_expert_parallel_size=engine.moe_expert_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
    )
    return engine
