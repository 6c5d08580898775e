"""The dialect models that `inflight serve --api` adds: in `backend/apis`, a folder for each API and in it each model.

An API's name with `-unary` behind it means the same models without streams: one response to each request. The name of
one of several models before it, as in `chat:vllm`, means that model's engine. Knows tritonserver's model configuration;
nothing of tensors.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigurationError

UNARY = "-unary"


@dataclass(frozen=True, kw_only=True)
class ApiModel:
    """A dialect model that is added to a repository."""

    api: str
    """As the operator has named it."""
    folder: Path
    """Where its config.pbtxt is."""
    is_unary: bool
    engine: str = ""
    """The model whose engine it uses; "" = the first."""


def choose(names: Sequence[str], folder: Path, engines: Sequence[str] = ()) -> dict[str, ApiModel]:
    """The models of the APIs with these names, by name. `folder`: `backend/apis`. `engines`: the names of several
    models. Raises ConfigurationError."""
    known = sorted(each.name for each in folder.iterdir() if each.is_dir())
    models: dict[str, ApiModel] = {}
    for name in dict.fromkeys(names):
        engine, colon, own = name.rpartition(":")
        if colon and engine not in engines:
            there = f"there are {', '.join(engines)}" if engines else "there is one without a name: serve NAME=MODEL"
            raise ConfigurationError(f"--api {name} names the model {engine}, and {there}")
        api = own.removesuffix(UNARY)
        if api not in known:
            near = difflib.get_close_matches(api, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}, each also with {UNARY}"
            raise ConfigurationError(f"--api has no {own!r}: {hint}")
        for model in sorted(each for each in (folder / api).iterdir() if each.is_dir()):
            if model.name in models:
                other = models[model.name].api
                raise ConfigurationError(f"--api {other} and {name} both have a model {model.name}: choose one of them")
            models[model.name] = ApiModel(api=name, folder=model, is_unary=own != api, engine=engine)
    return models
