"""Logits post-processors: functions of whoever runs the engine, which change a row's logits before its token is chosen.

The names are TensorRT-LLM's. A request names a function, which never crosses a process border: ranks import it by the
place that the configuration gives, or the program that runs the engine in its own process hands it over. When functions
are called is said in inflight.runtime.logits_post_processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError

BATCHED = "batched"
"""What a request names for the one function that takes all such rows of a step in one call."""


class LogitsPostProcessor(Protocol):
    """Changes `logits` in place, or returns others.

    `logits`: torch tensor (1, 1, vocabulary), float32, on the rank's device: the model's, before biases and penalties.
    `token_ids`: one list, of the prompt and what was generated so far. `stream`: the CUDA stream on which `logits` may
    be used, torch's current one; 0 on a CPU. `client_id`: the request's own, None if it has none.
    """

    def __call__(
        self, request_id: int, logits: Any, token_ids: list[list[int]], stream: int, client_id: str | None, /
    ) -> Any: ...


class BatchedLogitsPostProcessor(Protocol):
    """The same of all rows of a step that name it: lists of as many entries. Returns None or a list of tensors."""

    def __call__(
        self,
        request_ids: list[int],
        logits: list[Any],
        token_ids: list[list[list[int]]],
        stream: int,
        client_ids: list[str | None],
        /,
    ) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class LogitsPostProcessorConfig:
    """The functions of an engine."""

    processor_map: Mapping[str, LogitsPostProcessor] = field(default_factory=dict)
    """By the name that a request gives."""
    processor_batched: BatchedLogitsPostProcessor | None = None
    replicate: bool = True
    """True: every rank that samples calls them, so what they depend on must be equal on all of these. False: only the
    first one calls them, and the others get the logits from it."""

    def __post_init__(self) -> None:
        if BATCHED in self.processor_map:
            raise ConfigurationError(f"no logits post-processor can be named {BATCHED}: that names the batched one")
        for name, processor in (*self.processor_map.items(), (BATCHED, self.processor_batched)):
            if processor is not None and not callable(processor):
                raise ConfigurationError(f"the logits post-processor {name} is not a function, but {processor!r}")

    @property
    def names(self) -> list[str]:
        """What requests may name."""
        return [*self.processor_map, *([BATCHED] if self.processor_batched is not None else [])]

    @classmethod
    def load(cls, config: EngineConfig, *, is_caller: bool = True) -> LogitsPostProcessorConfig:
        """Those that `config` names, imported on the ranks that call them. `is_caller`: whether this rank is the first
        of those that sample. Raises ConfigurationError."""
        replicate, batched = config.logits_post_processor_replicate, config.logits_post_processor_batched
        load = _load if replicate or is_caller else lambda place: _called_elsewhere
        return cls(
            processor_map={name: load(place) for name, place in _entries(config).items()},
            processor_batched=load(batched) if batched else None,
            replicate=replicate,
        )


def _entries(config: EngineConfig) -> dict[str, str]:
    """Name -> module:attribute."""
    entries: dict[str, str] = {}
    for part in filter(None, map(str.strip, config.logits_post_processors.split(","))):
        name, _, place = (word.strip() for word in part.partition("="))
        if not name or not place:
            raise ConfigurationError(f"logits_post_processors must be name=module:attribute, ..., got {part!r}")
        if name in entries or name == BATCHED:
            raise ConfigurationError(f"logits_post_processors: the name {name} is given twice, or to a named one")
        entries[name] = place
    return entries


def _load(place: str) -> Any:
    module, colon, attribute = place.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(f"a logits post-processor is given as module:attribute, got {place!r}")
    try:
        found: Any = import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except Exception as error:
        raise ConfigurationError(
            f"the logits post-processor {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return found


def _called_elsewhere(*arguments: Any) -> None:
    raise AssertionError("only the first rank that samples calls logits post-processors")
