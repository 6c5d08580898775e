"""Writes the repository of several models: the engine's model once for each, under its name and with its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.supervisor import repository, shares
from inflight.supervisor.apis import ApiModel
from inflight.supervisor.repository import Fetch, ServedRepository
from inflight.supervisor.served_model import ServedModel

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


def write_several(
    source: Path,
    target: Path,
    models: Sequence[ServedModel],
    *,
    parameters: Mapping[str, str],
    api_models: Mapping[str, ApiModel],
    fetch: Fetch,
) -> ServedRepository:
    """As `repository.write`. `parameters`: of all engines. `api_models` without an engine get the first one. Raises
    ConfigurationError also if the models do not fit on this machine together."""
    found = repository.read(source)
    engines = [name for name, config in found.items() if _is_engine(config)]
    if len(engines) != 1:
        raise ConfigurationError(
            f"{source} has {len(engines)} models of backend {repository.BACKEND}; several models need exactly one, "
            "which each of them becomes"
        )
    folder = source / engines[0]
    names = {model.name for model in models}
    for name in (*(each for each in found if each != engines[0]), *api_models):
        if name in names:
            raise ConfigurationError(f"a model cannot be called {name} here: another one of the repository is")
    fetched: dict[str, str] = {}
    changes: dict[str, dict[str, str]] = {}
    configs: dict[str, EngineConfig] = {}
    for model in models:
        asked = repository.of_checkpoint(model.checkpoint, {**parameters, **model.parameters})
        changes[model.name] = repository.with_files(found[engines[0]], asked, folder, fetch, fetched)
        configs[model.name] = _config(found[engines[0]], changes[model.name], folder)
    weights = {model.name: model.share for model in models}
    on_demand = frozenset(model.name for model in models if model.is_on_demand)
    threads, memory = shares.share_cores(configs, weights, on_demand=on_demand), shares.share_memory(weights)
    shares.check_memory(configs, on_demand)
    target.mkdir(parents=True)
    for name, each in changes.items():
        if name in threads:
            each["num_threads"] = str(threads[name])
        each["memory_share"] = str(memory[name])
        copy = _copy(found[engines[0]])
        copy.name = name
        repository.write_model(folder, target / name, copy, each)
        configs[name] = _config(found[engines[0]], each, folder)
    attached = {name: api.engine or models[0].name for name, api in api_models.items()}
    for name, api in api_models.items():
        changes_of_api = {repository.ENGINE: attached[name]}
        repository.write_bare_model(api.folder, target / name, changes_of_api, is_unary=api.is_unary)
    others = [name for name in found if name != engines[0]]
    for name in others:
        repository.write_model(source / name, target / name, found[name], {})
    can_be_asked = repository.takes_token_ids(found[engines[0]])
    return ServedRepository(
        path=target,
        models=(*configs, *others),
        attached=attached,
        engine=models[0].name,
        answering=tuple(configs) if can_be_asked else (),
        config=configs[models[0].name],
        configs=configs,
        fetched=fetched,
    )


def _is_engine(config: ModelConfig) -> bool:
    return config.backend == repository.BACKEND and repository.ENGINE not in config.parameters


def _config(config: ModelConfig, parameters: Mapping[str, str], folder: Path) -> EngineConfig:
    """Checked. Raises ConfigurationError."""
    copy = _copy(config)
    repository.replace_parameters(copy, parameters)
    return repository.checked(copy, folder)


def _copy(config: ModelConfig) -> ModelConfig:
    copy = type(config)()
    copy.CopyFrom(config)
    return copy
