"""The models of a command line, and what it says of all of them or of one: KEY=VALUE, or NAME:KEY=VALUE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight_client.terminal import EXIT_USAGE, fail

if TYPE_CHECKING:
    from inflight.hub.model_name import ModelName


def by_model(texts: list[str] | None) -> tuple[list[str], dict[str, list[str]]]:
    """Assignments without a model's name, and those of each model that is named: NAME:KEY=VALUE."""
    of_all: list[str] = []
    of_models: dict[str, list[str]] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        name, colon, own = key.rpartition(":")
        if colon and equals:
            of_models.setdefault(name.strip(), []).append(f"{own}={value}")
        else:
            of_all.append(text)
    return of_all, of_models


def served(
    models: list[str] | None,
    share: list[str] | None,
    of_models: dict[str, list[str]],
    of_served: dict[str, list[str]],
    *,
    on_demand: bool = False,
    pinned: Sequence[str] = (),
) -> dict[str, Any]:
    """What ServeOptions say of the models: of one without a name it is the checkpoint of the repository's own."""
    from inflight.errors import ConfigurationError
    from inflight.supervisor.served_model import of_arguments, split_name

    given = models or []
    if len(given) <= 1 and not on_demand and not any(split_name(text)[0] for text in given):
        if share or of_models or of_served or pinned:
            raise fail("--share, --pin and NAME: are for several models, or one that is named NAME=MODEL", EXIT_USAGE)
        return {"checkpoint": model_of(given[0] if given else None)}
    if not given:
        raise fail("--load-on-demand needs models: name at least one", EXIT_USAGE)
    try:
        found = of_arguments(
            given,
            shares=assignments(share or [], "--share"),
            parameters={name: assignments(texts) for name, texts in of_models.items()},
            settings={name: assignments(texts, "--openai-set") for name, texts in of_served.items()},
            on_demand=on_demand,
            pinned=pinned,
        )
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None
    return {"models": found}


def model_of(text: str | None) -> Path | ModelName | None:
    """A MODEL of a command line."""
    from inflight.hub.model_name import find_name

    return None if text is None else find_name(text) or Path(text)


def assignments(texts: list[str], option: str = "--set") -> dict[str, str]:
    """{"KEY": "VALUE"} of KEY=VALUE texts."""
    assigned = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals):
            raise fail(f"{option} takes KEY=VALUE, got {text!r}", EXIT_USAGE)
        assigned[key.strip()] = value.strip()
    return assigned
