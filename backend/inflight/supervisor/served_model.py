"""One of several models of a server, as a command line names it: MODEL, or NAME=MODEL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.gguf.parts import ENDING
from inflight.hub.model_name import ModelName, find_name

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Of a model: it names a folder of the repository, and stands in paths of URLs."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    name: str
    """Of its engine, of tritonserver's model, and for clients."""
    checkpoint: Path | ModelName
    share: float = 1.0
    """Its weight where cores and memory are divided."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Its own, which replace those of all models."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the OpenAI server, its own, likewise."""
    is_on_demand: bool = False
    """Loaded when somebody asks for it."""

    @property
    def client_names(self) -> list[str]:
        """By which clients may ask for it: a model of the hub by that name, too."""
        on_hub = [str(self.checkpoint)] if isinstance(self.checkpoint, ModelName) else []
        return [self.name, *on_hub]


def split_name(text: str) -> tuple[str, str]:
    """NAME and MODEL of an argument; "" if it has no name. A path may have an equals sign behind its first slash."""
    name, equals, model = text.partition("=")
    return (name, model) if equals and "/" not in name else ("", text)


def choose_name(model: str) -> str:
    """What a model without a name is called: as its folder, its file or its repository on the hub."""
    found = find_name(model)
    last = found.name if found is not None else str(Path(model).resolve()).removesuffix(ENDING)
    return last.rpartition("/")[2]


def of_arguments(
    texts: Sequence[str],
    *,
    shares: Mapping[str, str] | None = None,
    parameters: Mapping[str, Mapping[str, str]] | None = None,
    settings: Mapping[str, Mapping[str, str]] | None = None,
    on_demand: bool = False,
    pinned: Sequence[str] = (),
) -> tuple[ServedModel, ...]:
    """The models of a command line. `shares`, `parameters` and `settings`: by the models' names. `on_demand`: all but
    those that are `pinned`. Raises ConfigurationError for names that are wrong, that two have or that nobody has."""
    named = [(name or choose_name(model), model) for name, model in map(split_name, texts)]
    names = [name for name, _ in named]
    for name, model in named:
        if NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"a model cannot be called {name!r}: write NAME={model}, with letters, digits, '.', '_' and '-'"
            )
        if names.count(name) > 1:
            raise ConfigurationError(f"two models are called {name}: write OTHER={model} for one of them")
    for option, given in (("--share", shares), ("--set", parameters), ("--openai-set", settings)):
        _check_known(option, given or {}, names)
    _check_known("--pin", pinned, names)
    if pinned and not on_demand:
        raise ConfigurationError("--pin is for servers with --load-on-demand: without it every model stays loaded")
    return tuple(
        ServedModel(
            name=name,
            checkpoint=find_name(model) or Path(model),
            share=_weight(name, (shares or {}).get(name, "1")),
            parameters=(parameters or {}).get(name, {}),
            settings=(settings or {}).get(name, {}),
            is_on_demand=on_demand and name not in pinned,
        )
        for name, model in named
    )


def _check_known(option: str, given: Mapping[str, object] | Sequence[str], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ConfigurationError(f"{option} names the model {name}, and there are {', '.join(names)}")


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < 1e9:
        raise ConfigurationError(f"--share {name}={text}: a share is a number above 0")
    return weight
