"""A dialect model: another Triton model of this backend on the ranks of an engine's model.

Its config.pbtxt has the parameter `engine`, the name of the model whose ranks it uses, instead of the engine's
configuration, which it finds beside the running engine. It launches no ranks, so no weights are loaded twice.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.output_config import Pooling
from inflight.server.pooled import ASKS
from inflight.server.self_unload import is_supervised
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.dialects import DIALECTS

if TYPE_CHECKING:
    from inflight.executor.front.front import Front

ENGINE, DIALECT, POOLING = "engine", "dialect", "embedding_pooling"

SUPERVISED_SECONDS = 5.0
"""How long to wait for the engine under a supervisor, which loads dialect models after their engine. Without one,
tritonserver loads all models at once, and the engine may need `worker_start_timeout_ms`."""


@dataclass(frozen=True, kw_only=True)
class DialectModel:
    """The parameters of a dialect model."""

    engine: str
    dialect: Dialect
    vector_of: Pooling | None = None
    """How a model that gives vectors makes them; None = as the checkpoint says."""

    @staticmethod
    def is_meant(parameters: Mapping[str, str]) -> bool:
        """Whether a model with these parameters attaches to an engine instead of launching one."""
        return bool(parameters.get(ENGINE))

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], model_name: str) -> DialectModel:
        """Without the parameter `dialect` the model's name chooses. Raises ConfigurationError."""
        name = parameters.get(DIALECT) or model_name
        others = (DIALECT, POOLING) if name in ASKS else (DIALECT,)
        for key in parameters:
            if key not in (ENGINE, *others):
                near = difflib.get_close_matches(key, (ENGINE, *others), 1)
                besides = " and ".join(others)
                hint = f"did you mean {near[0]}?" if near else f"a model with {ENGINE} takes only {besides} besides"
                raise ConfigurationError(f"{key} is no parameter of model {model_name}: {hint}")
        if name not in DIALECTS:
            raise ConfigurationError(f"{DIALECT} must be one of {', '.join(DIALECTS)}, got {name!r}")
        return cls(engine=parameters[ENGINE], dialect=DIALECTS[name], vector_of=_pooling(parameters.get(POOLING)))

    def find_engine_config(self) -> EngineConfig:
        """The configuration of the engine, once it serves. Raises ConfigurationError if it does not in time."""
        from inflight.executor.executor import find_engine_config

        seconds = SUPERVISED_SECONDS if is_supervised() else EngineConfig().worker_start_timeout_ms / 1000
        return find_engine_config(self.engine, seconds)

    def attach(self, config: EngineConfig, deaths: list[str]) -> Front:
        """A started front of the engine. `deaths`: see BackendServer. Raises ConfigurationError."""
        from inflight.executor.executor import attach_executor

        front = attach_executor(config, self.engine, on_engine_death=deaths.append)
        front.start()
        return front


def _pooling(value: str | None) -> Pooling | None:
    """Raises ConfigurationError."""
    for pooling in get_args(Pooling):
        if value == pooling:
            found: Pooling = pooling
            return found
    if value:
        raise ConfigurationError(f"{POOLING} must be one of {', '.join(get_args(Pooling))}, got {value!r}")
    return None
